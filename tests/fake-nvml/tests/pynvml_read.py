"""Prints what NVIDIA's own Python binding reads, as one line of JSON. A value that is refused is null."""
import json

import pynvml as n


def ask(f, *args):
    try:
        return f(*args)
    except n.NVMLError:
        return None


def text(value):
    return value.decode() if isinstance(value, bytes) else value


def link(device, number):
    if ask(n.nvmlDeviceGetNvLinkState, device, number) is None:
        return None
    pci = ask(n.nvmlDeviceGetNvLinkRemotePciInfo, device, number)
    return {
        "active": bool(n.nvmlDeviceGetNvLinkState(device, number)),
        "version": ask(n.nvmlDeviceGetNvLinkVersion, device, number),
        "bus": text(pci.busId) if pci else None,
    }


def processes(device):
    all = ask(n.nvmlDeviceGetComputeRunningProcesses, device)
    return None if all is None else [[p.pid, p.usedGpuMemory] for p in all]


def read(device, devices):
    memory = ask(n.nvmlDeviceGetMemoryInfo, device)
    use = ask(n.nvmlDeviceGetUtilizationRates, device)
    mig = ask(n.nvmlDeviceGetMigMode, device)
    links = [link(device, i) for i in range(18)]
    return {
        "uuid": text(n.nvmlDeviceGetUUID(device)),
        "name": text(n.nvmlDeviceGetName(device)),
        "minor": ask(n.nvmlDeviceGetMinorNumber, device),
        "bus": text(n.nvmlDeviceGetPciInfo(device).busId),
        "memory": [memory.total, memory.used] if memory else None,
        "utilisation": use.gpu if use else None,
        "power": ask(n.nvmlDeviceGetPowerUsage, device),
        "temperature": ask(n.nvmlDeviceGetTemperature, device, n.NVML_TEMPERATURE_GPU),
        "mig": mig[0] if mig else None,
        "links": [l for l in links if l],
        "processes": processes(device),
        "levels": [ask(n.nvmlDeviceGetTopologyCommonAncestor, device, d) for d in devices if d is not device],
    }


n.nvmlInit()
devices = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
print("JSON " + json.dumps({
    "driver": text(n.nvmlSystemGetDriverVersion()),
    "gpus": [read(d, devices) for d in devices],
}))
n.nvmlShutdown()
