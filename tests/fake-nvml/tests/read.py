"""Prints what NVIDIA's own binding (nvidia-ml-py, unchanged) reads of the scenario, as JSON."""

import json

import pynvml as n


def ask(call, *args):
    """The value, or None where NVML has none."""
    try:
        return call(*args)
    except n.NVMLError:
        return None


def text(value):
    return value.decode() if isinstance(value, bytes) else value


def links(device):
    found = []
    for link in range(18):
        up = ask(n.nvmlDeviceGetNvLinkState, device, link)
        if up is None:
            break
        pci = ask(n.nvmlDeviceGetNvLinkRemotePciInfo, device, link)
        found.append([up == 1, pci and text(pci.busId), ask(n.nvmlDeviceGetNvLinkVersion, device, link)])
    return found


def instances(device):
    most = ask(n.nvmlDeviceGetMaxMigDeviceCount, device) or 0
    handles = [ask(n.nvmlDeviceGetMigDeviceHandleByIndex, device, i) for i in range(most)]
    return [text(n.nvmlDeviceGetUUID(h)) for h in handles if h is not None]


def gpu(index, count):
    device = n.nvmlDeviceGetHandleByIndex(index)
    others = [n.nvmlDeviceGetHandleByIndex(j) for j in range(count) if j != index]
    memory = ask(n.nvmlDeviceGetMemoryInfo, device)
    rates = ask(n.nvmlDeviceGetUtilizationRates, device)
    mode = ask(n.nvmlDeviceGetMigMode, device)
    cpus = ask(n.nvmlDeviceGetCpuAffinity, device, 8)
    processes = ask(n.nvmlDeviceGetComputeRunningProcesses, device)
    return {
        "uuid": text(ask(n.nvmlDeviceGetUUID, device)),
        "name": text(ask(n.nvmlDeviceGetName, device)),
        "bus": text(n.nvmlDeviceGetPciInfo(device).busId),
        "minor": ask(n.nvmlDeviceGetMinorNumber, device),
        "memory": memory and memory.total,
        "utilisation": rates and rates.gpu,
        "power": ask(n.nvmlDeviceGetPowerUsage, device),
        "temperature": ask(n.nvmlDeviceGetTemperature, device, n.NVML_TEMPERATURE_GPU),
        "sm_clock": ask(n.nvmlDeviceGetClockInfo, device, n.NVML_CLOCK_SM),
        "cpus": cpus and list(cpus),
        "mig": mode and mode[0],
        "instances": instances(device),
        "links": links(device),
        "levels": [ask(n.nvmlDeviceGetTopologyCommonAncestor, device, other) for other in others],
        "processes": None if processes is None else [p.pid for p in processes],
    }


n.nvmlInit()
count = n.nvmlDeviceGetCount()
print(json.dumps({"driver": text(n.nvmlSystemGetDriverVersion()), "gpus": [gpu(i, count) for i in range(count)]}))
