//! nvml-wrapper and NVIDIA's own Python binding read the same from every scenario.
//!
//! NVML is one per process: each scenario is read by a process of its own, this test started again.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor, TopologyLevel};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

const SELF: &str = "FAKE_NVML_TEST_READ";

fn library() -> PathBuf {
    // `cargo test` alone leaves it beside this test, in target/debug/deps; `cargo build` also in target/debug.
    let exe = std::env::current_exe().unwrap();
    let mut places = exe.ancestors().skip(1).take(2).map(|dir| dir.join("libfake_nvml.so"));
    places.find(|file| file.is_file()).unwrap_or_else(|| panic!("no libfake_nvml.so beside {}", exe.display()))
}

fn scenarios() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("scenarios")
}

/// What nvml-wrapper reads of the scenario in the environment.
fn by_wrapper() -> Value {
    let file = library();
    let nvml = match Nvml::builder().lib_path(OsStr::new(&file)).init() {
        Ok(nvml) => nvml,
        Err(e) => return json!({ "init": e.to_string() }),
    };
    let count = nvml.device_count().unwrap();
    let gpu = |i: u32| {
        let d = nvml.device_by_index(i).unwrap();
        let links: Vec<Value> = (0..18)
            .map_while(|l| {
                let link = d.link_wrapper_for(l);
                let up = link.is_active().ok()?;
                let bus = link.remote_pci_info().ok().map(|p| p.bus_id);
                Some(json!([up, bus, link.version().ok()]))
            })
            .collect();
        let level = |j: u32| {
            let level = d.topology_common_ancestor(nvml.device_by_index(j).ok()?).ok()?;
            Some(match level {
                TopologyLevel::Internal => 0,
                TopologyLevel::Single => 10,
                TopologyLevel::Multiple => 20,
                TopologyLevel::HostBridge => 30,
                TopologyLevel::Node => 40,
                TopologyLevel::System => 50,
            })
        };
        let instances: Vec<String> =
            (0..d.mig_device_count().unwrap_or(0)).filter_map(|m| d.mig_device_by_index(m).ok()?.uuid().ok()).collect();
        json!({
            "uuid": d.uuid().ok(),
            "name": d.name().ok(),
            "bus": d.pci_info().ok().map(|p| p.bus_id),
            "minor": d.minor_number().ok(),
            "memory": d.memory_info().ok().map(|m| m.total),
            "utilisation": d.utilization_rates().ok().map(|u| u.gpu),
            "power": d.power_usage().ok(),
            "temperature": d.temperature(TemperatureSensor::Gpu).ok(),
            "sm_clock": d.clock_info(Clock::SM).ok(),
            "cpus": d.cpu_affinity(8).ok(),
            "mig": d.mig_mode().ok().map(|m| m.current),
            "instances": instances,
            "links": links,
            "levels": (0..count).filter(|j| *j != i).map(level).collect::<Vec<_>>(),
            "processes": d.running_compute_processes().ok().map(|p| p.iter().map(|p| p.pid).collect::<Vec<_>>()),
        })
    };
    json!({ "driver": nvml.sys_driver_version().ok(), "gpus": (0..count).map(gpu).collect::<Vec<_>>() })
}

/// Reads a scenario in a process of its own.
fn read(scenario: &Path) -> Value {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "one_scenario", "--nocapture"]).env(SELF, "1").env("PLIANT_FAKE_NVML", scenario);
    let out = command.output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let line = text.lines().find_map(|l| l.split_once("READ ")).map(|(_, json)| json.to_owned());
    serde_json::from_str(&line.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&out.stderr)))).unwrap()
}

/// Not a test by itself: what [`read`] starts.
#[test]
fn one_scenario() {
    if std::env::var_os(SELF).is_some() {
        println!("READ {}", by_wrapper());
    }
}

fn all() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(scenarios()).unwrap().map(|e| e.unwrap().path()).collect();
    all.sort();
    assert!(all.len() >= 11, "{all:?}");
    all
}

fn of<'a>(value: &'a Value, gpu: usize, key: &str) -> &'a Value {
    &value["gpus"][gpu][key]
}

#[test]
fn boxes_are_what_they_are_called() {
    let at = |name: &str| read(&scenarios().join(format!("{name}.toml")));
    let links = |v: &Value, gpu: usize| of(v, gpu, "links").as_array().unwrap().len();
    let v = at("dgx1-v100");
    assert_eq!((v["gpus"].as_array().unwrap().len(), links(&v, 0), links(&v, 7)), (8, 6, 6));
    let v = at("dgx2");
    assert_eq!((v["gpus"].as_array().unwrap().len(), links(&v, 15)), (16, 6));
    assert_eq!((links(&at("dgx-a100"), 3), links(&at("hgx-h100"), 3), links(&at("gb200-tray"), 3)), (12, 18, 18));
    let v = at("pcie-bridges");
    let other: Vec<&str> = of(&v, 0, "links").as_array().unwrap().iter().filter_map(|l| l[1].as_str()).collect();
    assert!(other.len() == 12 && other.iter().all(|b| *b == "00000000:65:00.0"), "{other:?}");
    assert_eq!(links(&at("box-4090"), 0), 0);
    let v = at("mig-mixed");
    let instances: Vec<usize> = (0..3).map(|g| of(&v, g, "instances").as_array().unwrap().len()).collect();
    assert_eq!(
        (instances, of(&v, 1, "utilisation"), of(&v, 0, "utilisation")),
        (vec![0, 3, 0], &Value::Null, &json!(40))
    );
    let v = at("vgpu");
    assert_eq!((of(&v, 0, "power"), of(&v, 0, "cpus"), of(&v, 0, "mig")), (&Value::Null, &Value::Null, &Value::Null));
    assert_ne!(of(&v, 0, "memory"), &Value::Null);
}

#[test]
fn nvidias_own_binding_reads_the_same() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let wheels = std::fs::read_dir(root.join(".cache/data")).into_iter().flatten().filter_map(|e| Some(e.ok()?.path()));
    let Some(wheel) =
        wheels.into_iter().find(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("nvidia_ml_py")))
    else {
        println!("skipped: no nvidia-ml-py in .cache/data (./dev test fetches it)");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(library(), dir.path().join("libnvidia-ml.so.1")).unwrap();
    for scenario in all() {
        let out = Command::new("/usr/bin/python3")
            .arg(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/read.py"))
            .env("PYTHONPATH", &wheel)
            .env("LD_LIBRARY_PATH", dir.path())
            .env("PLIANT_FAKE_NVML", &scenario)
            .output()
            .unwrap();
        assert!(out.status.success(), "{}: {}", scenario.display(), String::from_utf8_lossy(&out.stderr));
        let theirs: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(read(&scenario), theirs, "{}", scenario.display());
    }
}

fn changed(change: &str) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.toml");
    let text = std::fs::read_to_string(scenarios().join("mixed-1080.toml")).unwrap();
    std::fs::write(&path, text.replace("[gpu.1]", &format!("[gpu.1]\n{change}"))).unwrap();
    read(&path)
}

#[test]
fn failures_are_played() {
    let v = changed("lost = \"gone\"");
    assert_eq!(v["gpus"].as_array().unwrap().len(), 2);
    let v = changed("lost = \"error\"");
    assert_eq!((v["gpus"].as_array().unwrap().len(), of(&v, 1, "uuid")), (3, &Value::Null));
    // B39: one call fails on one device: both are listed.
    let v = changed("[[fail]]\ncall = \"nvmlDeviceGetMemoryInfo_v2\"\ndevice = 0\nerror = 999\n[gpu.2]\n");
    assert_eq!((of(&v, 0, "memory"), of(&v, 1, "memory") == &Value::Null), (&Value::Null, false));
    let v = changed("processes = [{ pid = 7 }, { pid = 8, memory_mib = 100 }]");
    assert_eq!(of(&v, 1, "processes"), &json!([7, 8]));
    assert!(changed("nonsense = 1")["init"].is_string(), "a mistake in the file is no box without GPUs");
    assert!(read(Path::new("/nowhere"))["init"].as_str().unwrap().contains("driver"));
}
