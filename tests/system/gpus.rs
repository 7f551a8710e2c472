//! GPUs and topology over the lab: every agent reads a simulated NVML.

use pliant_lab::Lab;
use pliant_model::gpu::Happening;
use pliant_protocol::admin::{Finding, GpuState, GpuView, Level};
use pliant_tests::{Options, Training};
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(60);

fn scenario(name: &str) -> PathBuf {
    pliant_tests::root().join(format!("tests/fake-nvml/scenarios/{name}.toml"))
}

fn builder(nodes: u16) -> pliant_lab::Builder {
    Lab::builder().nodes(nodes).gpus(8).poll_interval(1).scenario(scenario("lab-8"))
}

fn json(lab: &Lab, user: &str, words: &[&str]) -> Value {
    let out = lab.command(user, "pliant").unwrap().args(words).arg("--json").output().unwrap();
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&out.stderr)))
}

fn gpus(lab: &Lab, user: &str) -> Vec<GpuView> {
    serde_json::from_value(json(lab, user, &["gpus"])["gpus"].clone()).unwrap()
}

fn events(lab: &Lab) -> Vec<pliant_model::gpu::GpuEvent> {
    serde_json::from_value(json(lab, "root", &["gpus"])["events"].clone()).unwrap()
}

/// Waits until pliantd knows the GPUs of every node.
fn known(lab: &Lab) {
    lab.wait_for(WAIT, "pliantd knows all GPUs", || {
        let all = gpus(lab, "root");
        !all.is_empty() && all.iter().all(|g| g.gpu.is_some() && g.sample.is_some())
    })
    .unwrap();
}

/// Adds to the scenario of a node while it runs.
fn add(lab: &Lab, node: &str, text: &str) {
    let path = lab.spec().scenario_of(node);
    let old = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("{old}\n{text}\n")).unwrap();
}

fn check(lab: &Lab) -> Vec<Finding> {
    serde_json::from_value(json(lab, "root", &["topo", "check"])["findings"].clone()).unwrap()
}

#[test]
fn identity_telemetry_and_whose_gpus_they_are() {
    let lab = builder(2).start().unwrap();
    known(&lab);
    let all = gpus(&lab, "root");
    assert_eq!(all.len(), 16);
    let uuids: std::collections::BTreeSet<&str> = all.iter().map(|g| g.gpu.as_ref().unwrap().uuid.as_str()).collect();
    assert_eq!(uuids.len(), 16, "no two GPUs have one UUID");
    assert!(all.iter().all(|g| g.gpu.as_ref().unwrap().minor == g.index && g.state == GpuState::Idle));
    // B59: a job that owns 2 of 8 is shown with 2, and nobody else sees whose they are.
    let job = lab.sbatch(lab.user(0), &["--nodelist=n1", "--gres=gpu:2", "--wrap", "sleep 60"]).unwrap();
    lab.wait_state(job, "RUNNING", WAIT).unwrap();
    lab.wait_for(WAIT, "the job is shown", || gpus(&lab, lab.user(0)).iter().any(|g| g.job == Some(job))).unwrap();
    let of = |user: &str| gpus(&lab, user).iter().filter(|g| g.job == Some(job)).count();
    assert_eq!((of(lab.user(0)), of("root"), of(lab.user(1))), (2, 2, 0));
    let used = gpus(&lab, lab.user(1)).iter().filter(|g| g.state == GpuState::Used).count();
    assert_eq!(used, 2, "that they are used, everybody sees");
    let text = lab.run(lab.user(0), &["pliant", "topo", "show", "n1"]).unwrap();
    assert!(text.contains("GPU0 X    NV2  NV2  NV4"), "{text}");
    let picture = lab.home(lab.user(0)).join("n1.svg");
    lab.run(lab.user(0), &["pliant", "topo", "show", "n1", "--svg", picture.to_str().unwrap()]).unwrap();
    assert!(std::fs::read_to_string(&picture).unwrap().ends_with("</svg>\n"));
}

/// B01, B04, B45: what is not as it should be is told within a look or two, with pid, owner and GPU.
#[test]
fn processes_and_memory_that_are_not_as_they_should_be() {
    let lab = builder(1).start().unwrap();
    known(&lab);
    let job = lab.sbatch(lab.user(0), &["--gres=gpu:2", "--wrap", "echo $$ > pid; sleep 300"]).unwrap();
    lab.wait_state(job, "RUNNING", WAIT).unwrap();
    let file = lab.home(lab.user(0)).join("pid");
    let pid = lab.wait_some(WAIT, "the job's pid", || std::fs::read_to_string(&file).ok()?.trim().parse::<u32>().ok());
    let pid = pid.unwrap();
    lab.wait_for(WAIT, "the job is shown", || gpus(&lab, "root").iter().any(|g| g.job == Some(job))).unwrap();
    let own: Vec<u32> = gpus(&lab, "root").iter().filter(|g| g.job == Some(job)).filter_map(|g| g.index).collect();
    let other = (0..4).find(|i| !own.contains(i)).unwrap();
    // GPU 7 is near CPUs 32-63, which this machine does not have.
    let on =
        |gpu: u32| format!("[gpu.{gpu}]\nprocesses = [{{ pid = {pid}, memory_mib = 900 }}]\nmemory_used_mib = 900\n");
    add(&lab, "n0", &format!("{}{}[gpu.6]\nmemory_used_mib = 9000\n", on(own[0]), on(other)));
    let find = |what: &str| {
        lab.wait_some(Duration::from_secs(10), what, || {
            events(&lab).into_iter().find(|e| format!("{:?}", e.what).starts_with(what))
        })
        .unwrap()
    };
    let outside = find("Outside");
    assert_eq!(outside.gres_index, Some(other));
    let Happening::Outside { pid: p, uid, job: j } = outside.what else { panic!() };
    assert_eq!((p, j), (pid, Some(job)));
    assert!(uid.is_some_and(|u| u > 0));
    let orphaned = find("Orphaned");
    assert_eq!((orphaned.gres_index, orphaned.what), (Some(6), Happening::Orphaned { memory_mib: 9000 }));
    assert!(!events(&lab).iter().any(|e| e.gres_index == Some(own[0])), "on its own GPU all is well");
    let held = |i: u32| gpus(&lab, "root").into_iter().find(|g| g.index == Some(i)).unwrap();
    assert_eq!(held(6).state, GpuState::Held, "{}", held(6).reason);
    assert_eq!(held(5).state, GpuState::Idle, "its neighbour can be used");
}

/// B01: tasks on CPUs far from their GPUs are named with both lists of CPUs.
#[test]
fn a_task_far_from_its_gpu_is_named() {
    let lab = builder(1).start().unwrap();
    known(&lab);
    // All eight, so that the far ones are among them.
    let job = lab.sbatch(lab.user(0), &["--gres=gpu:8", "--wrap", "echo $$ > pid; sleep 300"]).unwrap();
    lab.wait_state(job, "RUNNING", WAIT).unwrap();
    let file = lab.home(lab.user(0)).join("pid");
    let pid = lab.wait_some(WAIT, "the job's pid", || std::fs::read_to_string(&file).ok()?.trim().parse::<u32>().ok());
    add(&lab, "n0", &format!("[gpu.5]\nprocesses = [{{ pid = {}, memory_mib = 9 }}]\n", pid.unwrap()));
    let event = lab.wait_some(Duration::from_secs(10), "the event", || {
        events(&lab).into_iter().find(|e| matches!(e.what, Happening::Far { .. }))
    });
    let event = event.unwrap();
    let Happening::Far { near, task, job: j, .. } = &event.what else { panic!() };
    assert_eq!((event.gres_index, near.as_str(), *j), (Some(5), "32-63", Some(job)));
    assert!(task.starts_with('0'), "{task}");
}

/// B41: an Xid carries time and boot, and one that an application causes takes no node out of service.
#[test]
fn an_xid_of_an_application_changes_nothing() {
    let lab = builder(1).start().unwrap();
    known(&lab);
    add(&lab, "n0", "[[xid]]\ndevice = 2\ncode = 31\n[[xid]]\ndevice = 3\ncode = 79\n");
    lab.wait_for(Duration::from_secs(10), "both Xid events", || events(&lab).len() == 2).unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let all = events(&lab);
    assert!(all.iter().all(|e| e.boot_id == boot.trim() && e.at_ms > 1_600_000_000_000));
    let by_user = |index| all.iter().find(|e| e.gres_index == Some(index)).map(|e| e.what.clone());
    assert_eq!(by_user(2), Some(Happening::Xid { code: 31, by_user: true }));
    assert_eq!(by_user(3), Some(Happening::Xid { code: 79, by_user: false }));
    assert!(gpus(&lab, "root").iter().all(|g| g.state == GpuState::Idle));
}

/// `pliant topo check` finds each way in which gres.conf can be wrong, and an export makes it right.
#[test]
fn check_finds_what_is_wrong_and_an_export_mends_it() {
    let lab = builder(2).start().unwrap();
    known(&lab);
    let all = check(&lab);
    assert!(all.len() == 1 && all[0].level == Level::Ok, "{all:?}");
    let path = lab.dir().join("etc/gres.conf");
    let right = std::fs::read_to_string(&path).unwrap();
    let gpu = |n: u32| format!("{}/gpu{n} ", lab.spec().devices.display());
    let first = right.lines().find(|l| l.contains(&gpu(0))).unwrap().to_owned();
    let wrong: [(&str, String); 5] = [
        ("no Cores=", right.replace("Cores=0-31 ", "")),
        ("Links= says 3 to GPU 1", right.replacen("Links=-1,2", "Links=-1,3", 1)),
        ("Cores= says 32-63", right.replacen("Cores=0-31", "Cores=32-63", 1)),
        ("are one device", right.replace(&gpu(1), &gpu(0))),
        ("gres.conf 7", right.replace(&format!("{first}\n"), "")),
    ];
    for (word, text) in wrong {
        std::fs::write(&path, text).unwrap();
        let found = check(&lab);
        assert!(found.iter().any(|f| f.found.contains(word)), "{word}: {found:?}");
        let hosts: Vec<String> = found.iter().filter_map(|f| f.host.as_ref().map(ToString::to_string)).collect();
        assert!(hosts.iter().any(|h| h == "n[0-1]"), "{hosts:?}");
    }
    std::fs::write(&path, &right).unwrap();
    add(&lab, "n1", "[gpu.3]\nlost = \"error\"\n");
    let lost =
        lab.wait_some(WAIT, "the lost card", || check(&lab).into_iter().find(|f| f.check == "lost card")).unwrap();
    assert_eq!((lost.level, lost.host.as_ref().map(|h| h.0.as_str())), (Level::Fail, Some("n1")));
    assert!(lost.found.starts_with("GPU 3 (GPU-"), "{}", lost.found);
}

/// What is exported is what Slurm reads: labs start with it, and allocate by its links.
#[test]
fn exports_are_accepted_by_slurm() {
    let tree = "SwitchName=s0 Nodes=n[0-1]\nSwitchName=s1 Nodes=n[2-3]\nSwitchName=top Switches=s[0-1]\n";
    let plain: String = (0..8).map(|g| format!("Name=gpu File={{devices}}/gpu{g}\n")).collect();
    let lab =
        builder(4).gres_conf(plain).topology_conf(tree).conf_line("TopologyPlugin=topology/tree").start().unwrap();
    known(&lab);
    assert!(check(&lab).iter().any(|f| f.found.contains("no Cores=")));
    let export = |what: &str| lab.run("root", &["pliant", "topo", "export", what]).unwrap();
    let (gres, topology) = (export("gres.conf"), export("topology.conf"));
    assert!(gres.contains("Cores=0-31 Links=-1,2,2,4,1,1,1,1"), "{gres}");
    assert!(export("topology.yaml").contains("- switch: s0"));
    let devices = lab.spec().devices.display().to_string();
    let cluster = lab.run("root", &["pliant", "topo", "show"]).unwrap();
    assert!(cluster.contains("n[0-1] (8 x NVIDIA A100-SXM4-40GB)"), "{cluster}");
    lab.down().unwrap();
    let lab = builder(4)
        .gres_conf(gres.replace(&devices, "{devices}"))
        .topology_conf(topology)
        .conf_line("TopologyPlugin=topology/tree")
        .start()
        .unwrap();
    known(&lab);
    let all = check(&lab);
    assert!(all.len() == 1 && all[0].level == Level::Ok, "{all:?}");
    let job = lab.sbatch(lab.user(0), &["--nodes=2", "--switches=1", "--gres=gpu:2", "--wrap", "sleep 30"]).unwrap();
    lab.wait_state(job, "RUNNING", WAIT).unwrap();
    let nodes = lab.run(lab.user(0), &["squeue", "-h", "-o", "%N", "-j", &job.to_string()]).unwrap();
    assert!(["n[0-1]", "n[2-3]"].contains(&nodes.trim()), "{nodes}");
}

/// B05, B62: a rank knows its GPU in its mask and on the node, and CUDA counts by PCI bus id.
#[test]
fn ranks_know_both_ordinals() {
    let lab = builder(1).start().unwrap();
    let options = Options { elastic: None, ..Options::default() };
    let options = options.sbatch(&["--gpus=4", "--nodes=1", "--cpus-per-gpu=1"]);
    let command = "env";
    let job = Training::command(&lab, &options, command).unwrap();
    lab.wait_end(job.job, WAIT).unwrap();
    let text = job.text();
    let values = |name: &str| {
        let mut all: Vec<&str> =
            text.lines().filter_map(|l| l.split_once(&format!("{name}=")).map(|(_, v)| v)).collect();
        all.sort_unstable();
        all
    };
    assert_eq!(values("PLIANT_JOB_GPU_ORDINAL"), ["0", "1", "2", "3"], "{text}");
    let node = values("PLIANT_JOB_GPU_NODE_ORDINAL");
    let mask = values("SLURM_STEP_GPUS");
    assert_eq!(node.join(","), mask[0], "{text}");
    assert_eq!(values("CUDA_DEVICE_ORDER"), ["PCI_BUS_ID"; 4]);
}

/// Wrong input is named with what to do.
#[test]
fn wrong_input_is_named() {
    let lab = builder(1).start().unwrap();
    known(&lab);
    let file = lab.home(lab.user(0)).join("capture.txt");
    let run = |words: &[&str]| {
        let out = lab.command(lab.user(0), "pliant").unwrap().args(words).output().unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    for (text, word) in [
        ("nothing of use\n", "nvidia-smi topo -m"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-3\nGPU1\t X \tNV4\t0-3\n", "line 3: row GPU1"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "below itself"),
        ("Name=gpu File={{ x }}\n", "capture.txt:1"),
    ] {
        std::fs::write(&file, text).unwrap();
        let (code, said) = run(&["topo", "import", file.to_str().unwrap()]);
        assert_eq!(code, Some(1), "{text}");
        assert!(said.contains(word), "{said}");
    }
    let (code, said) = run(&["topo", "show", "nowhere"]);
    assert!(code == Some(1) && said.contains("node nowhere"), "{said}");
    let (code, said) = run(&["gpus", "--node", "n[0-9"]);
    assert!(code == Some(1) && said.contains("n[0-9"), "{said}");
    assert_eq!(run(&["topo", "export", "gres"]).0, Some(2));
}

/// What each kind of box says through NVML, the agent and pliantd: what is not available stays so.
#[test]
fn boxes_of_all_kinds() {
    let of = |name: &str, count: u16| {
        let lab = Lab::builder().nodes(1).gpus(count).poll_interval(1).scenario(scenario(name)).start().unwrap();
        known(&lab);
        lab
    };
    let lab = of("dgx1-v100", 8);
    let text = lab.run("root", &["pliant", "topo", "show", "n0"]).unwrap();
    assert!(text.contains("GPU0 X    NV1  NV1  NV2  NV2  SYS  SYS  SYS"), "{text}");
    lab.down().unwrap();
    // B34: a GPU cut into instances has no utilisation, which is not 0; B39: a memory call fails on one of three.
    let lab = of("mig-mixed", 3);
    add(&lab, "n0", "[[fail]]\ncall = \"nvmlDeviceGetMemoryInfo_v2\"\ndevice = 0\nerror = 999\n");
    lab.restart("agent.n0").unwrap();
    lab.wait_for(WAIT, "the agent is back", || {
        gpus(&lab, "root")[0].sample.as_ref().is_some_and(|s| s.memory_used_mib.is_none())
    })
    .unwrap();
    let all = gpus(&lab, "root");
    let utilisation: Vec<Option<u32>> = all.iter().map(|g| g.sample.as_ref().unwrap().utilisation).collect();
    assert_eq!(utilisation, [Some(40), None, None]);
    let instances: Vec<usize> = all.iter().map(|g| g.gpu.as_ref().unwrap().instances.len()).collect();
    assert_eq!((instances, all[0].gpu.as_ref().unwrap().memory_mib), (vec![0, 3, 0], None));
    assert_eq!(all[1].gpu.as_ref().unwrap().instances[0].profile.as_deref(), Some("3g.20gb"));
    lab.down().unwrap();
    let lab = of("vgpu", 1);
    let all = gpus(&lab, "root");
    let sample = all[0].sample.as_ref().unwrap();
    assert_eq!((sample.power_mw, sample.temperature_c, &sample.processes), (None, None, &None));
    assert_eq!(sample.utilisation, Some(0));
    lab.down().unwrap();
    // B62: CUDA would count the 1080 Ti first; by index, minor and UUID it is the middle one.
    let lab = of("mixed-1080", 3);
    let all = gpus(&lab, "root");
    let middle = all[1].gpu.as_ref().unwrap();
    assert_eq!((all[1].index, middle.minor, middle.model.as_deref()), (Some(1), Some(1), Some("GeForce GTX 1080 Ti")));
    assert!(middle.uuid.ends_with("000000000001"));
    lab.down().unwrap();
    let lab = of("gb200-tray", 4);
    let text = lab.run("root", &["pliant", "topo", "show"]).unwrap();
    assert!(text.contains("NVLink domain 5c1d0d2e8a4f4b6e9d3a77e0b1c2d3e4 clique 7: n0"), "{text}");
}
