//! Situations that people reported (their numbers are those of the collection of cases), and the smaller promises of
//! `pliant run`.

use pliant_lab::Lab;
use pliant_tests::{Options, Training};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(60);

fn lab(gpus: u16) -> Lab {
    Lab::builder().nodes(2).gpus(gpus).poll_interval(1).start().unwrap()
}

/// B03: `NoDevFiles` in the visible-device variable is zero GPUs: a world of 0, the reason, and the documented code.
#[test]
fn no_gpu_at_all_is_a_world_of_zero() {
    let lab = lab(4);
    let options = Options { elastic: None, before: "export CUDA_VISIBLE_DEVICES=NoDevFiles", ..Options::default() };
    let job = Training::submit(&lab, &options.sbatch(&["--ntasks=1"])).unwrap();
    lab.wait_end(job.job, WAIT).unwrap();
    assert_eq!(job.exit_code(&lab).unwrap(), "65:0", "{}", job.text());
    assert!(job.text().contains("pliant:"), "{}", job.text());
    assert!(job.events().is_empty());
}

/// B50: a Slurm command that never answers delays no job that does not need it, and none is left behind.
#[test]
fn hanging_commands_do_not_delay_a_start() {
    let lab = lab(4);
    let dir = lab.dir().join("hang");
    std::fs::create_dir_all(&dir).unwrap();
    for name in ["squeue", "scontrol", "sinfo", "sacctmgr"] {
        let path = dir.join(name);
        std::fs::write(&path, "#!/bin/sh\nexec sleep 1000\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    // The plugin runs no command: an elastic job without `pliant run` starts as ever.
    let path = format!("--export=ALL,PATH={}:/usr/bin:/bin", dir.display());
    let job = lab.sbatch(lab.user(0), &["--gpus=1", "--elastic=2", &path, "--wrap", "true"]).unwrap();
    assert_eq!(lab.wait_end(job, Duration::from_secs(15)).unwrap(), "COMPLETED");
    // `pliant run` needs to know its allocation: it says so and ends with the documented code.
    let before: &'static str = format!("export PATH={}:$PATH", dir.display()).leak();
    let job = Training::submit(&lab, &Options { before, ..Options::default() }).unwrap();
    lab.wait_end(job.job, Duration::from_secs(120)).unwrap();
    assert_eq!(job.exit_code(&lab).unwrap(), "69:0", "{}", job.text());
    let left = pliant_tests::training::processes(&["sleep 1000"]);
    let of_lab = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/environ")).is_ok_and(|e| e.contains(&*dir.to_string_lossy()))
    };
    assert!(!left.iter().any(of_lab), "{left:?}");
}

/// B66: memory variables of the parent that exclude each other do not reach the slices.
#[test]
fn inherited_memory_variables_do_not_stop_a_slice() {
    let lab = lab(4);
    let before =
        "export SLURM_MEM_PER_CPU=100 SLURM_MEM_PER_NODE=200 SLURM_MEM_PER_GPU=300 SALLOC_GPUS=7 SBATCH_GPUS=7";
    let job = Training::submit(&lab, &Options { before, ..Options::default() }.elastic("4")).unwrap();
    job.wait_world(&lab, 4, WAIT).unwrap();
}

/// B15: what is pending is Slurm's; nothing of ours touches it. B23: a shrink names slices, and exactly their ranks go.
#[test]
fn a_shrink_takes_exactly_its_slice() {
    let lab = lab(4);
    let options = Options::default().elastic("6").sbatch(&["--gpus=2", "--nodes=1", "--nodelist=n0"]);
    let job = Training::submit(&lab, &options).unwrap();
    let view = job.wait_world(&lab, 6, WAIT).unwrap();
    let on = |node: &str| view.status.slices.iter().find(|s| s.node.as_str() == node).map(|s| s.job);
    let (near, far) = (on("n0"), on("n1").unwrap());
    let rigid =
        lab.sbatch(lab.user(1), &["--nodes=1", "--gres=gpu:4", "--nodelist=n1", "--wrap", "sleep 600"]).unwrap();
    lab.wait_state(rigid, "RUNNING", WAIT).unwrap();
    let left: Vec<_> = job.slices(&lab).unwrap().into_iter().map(|s| s.id).collect();
    assert!(!left.contains(&far), "{left:?}");
    if let Some(near) = near {
        assert!(left.contains(&near), "the slice on n0 was not asked for: {left:?}");
    }
}

/// B16: the node of rank 0 is given back last; when it must go, the next world has another one.
#[test]
fn the_host_of_rank_zero_may_go() {
    let lab = lab(4);
    let options = Options::default().elastic("0-8").sbatch(&["--ntasks=1"]).steps(5000);
    let job = Training::submit(&lab, &options).unwrap();
    let view = job.wait_world(&lab, 8, WAIT).unwrap();
    let first = view.status.world.first().unwrap().node.clone();
    let rigid = |node: &str| {
        let place = format!("--nodelist={node}");
        lab.sbatch(lab.user(1), &["--nodes=1", "--gres=gpu:4", &place, "--wrap", "sleep 600"]).unwrap()
    };
    // Any node would do for a job of four: the one of rank 0 stays.
    let any = lab.sbatch(lab.user(1), &["--nodes=1", "--gres=gpu:4", "--wrap", "sleep 600"]).unwrap();
    lab.wait_state(any, "RUNNING", WAIT).unwrap();
    let view = job.wait_world(&lab, 4, WAIT).unwrap();
    assert_eq!(view.status.world.first().unwrap().node, first);
    lab.run("root", &["scancel", &any.to_string()]).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    let that = rigid(first.as_str());
    lab.wait_state(that, "RUNNING", WAIT).unwrap();
    let view = job.wait_world(&lab, 4, WAIT).unwrap();
    assert_ne!(view.status.world.first().unwrap().node, first);
    let check = job.check(&lab).unwrap();
    for key in ["lost", "repeated", "redone"] {
        assert_eq!(check.get(key).and_then(Value::as_u64), Some(0), "{key}: {check}");
    }
}

/// `scancel -s` reaches every rank of every slice; `--label` names the ranks in the output.
#[test]
fn signals_and_labels_reach_every_rank() {
    let lab = Lab::builder().nodes(2).gpus(4).poll_interval(1).pliant_set("elastic.client_wait=1").start().unwrap();
    let script = lab.home(lab.user(0)).join("trap.sh");
    let text = "trap 'echo got usr1 as $RANK of $WORLD_SIZE' USR1\necho up $RANK of $WORLD_SIZE\nfor i in $(seq 600); do sleep 0.2; done\n";
    std::fs::write(&script, text).unwrap();
    let options = Options { run: vec!["--label".into()], ..Options::default() }.elastic("6");
    let job = Training::command(&lab, &options, &format!("bash {}", script.display())).unwrap();
    job.wait_world(&lab, 6, WAIT).unwrap();
    lab.wait_for(WAIT, "all ranks are up", || job.text().matches(" of 6").count() == 6).unwrap();
    lab.run(job.user, &["scancel", "--signal=USR1", &job.job.to_string()]).unwrap();
    // With proctrack/linuxproc Slurm signals the base's ranks itself too: some may say it twice.
    let said = |rank: u32| job.text().contains(&format!("[{rank}] got usr1 as {rank} of 6"));
    lab.wait_for(WAIT, "all ranks got the signal", || (0..6).all(said))
        .unwrap_or_else(|e| panic!("{}\n{e}", job.text()));
}

/// torchrun runs once per node, in a world that Pliant sets; flags of its own that name a world are left out.
#[test]
fn torchrun_gets_its_world() {
    let store = "from torch.distributed import TCPStore; TCPStore('127.0.0.1', 0, 1, True)";
    let out = std::process::Command::new("/usr/bin/python3").args(["-c", store]).output().unwrap();
    if String::from_utf8_lossy(&out.stderr).contains("without libuv") {
        eprintln!("skipped: this PyTorch is built without libuv, and its torchrun starts nothing");
        return;
    }
    let lab = lab(4);
    let script = lab.home(lab.user(0)).join("ranks.py");
    let text =
        "import os,time\nos.write(1, 'rank {RANK} of {WORLD_SIZE}\\n'.format(**os.environ).encode())\ntime.sleep(5)\n";
    std::fs::write(&script, text).unwrap();
    // Debian 12's torchrun (1.13 under Python 3.11) starts nothing without these.
    let before = "export PET_REDIRECTS=9:1 PET_TEE=9:1";
    let options = Options { elastic: None, before, ..Options::default() };
    let options = options.sbatch(&["--nodes=2", "--gpus-per-node=2"]);
    let command =
        format!("/usr/bin/python3 -m torch.distributed.run --nnodes=1 --nproc_per_node=1 {}", script.display());
    let job = Training::command(&lab, &options, &command).unwrap();
    assert_eq!(lab.wait_end(job.job, WAIT * 2).unwrap(), "COMPLETED", "{}", job.text());
    for rank in 0..4 {
        assert!(job.text().contains(&format!("rank {rank} of 4")), "{}", job.text());
    }
}

/// C12: a plugin built for another release is refused by name with both versions, nothing is half loaded, and a
/// submission that does not use it goes through.
#[test]
fn a_plugin_of_another_release_is_refused_whole() {
    let lab = lab(4);
    let plugin = lab.dir().join("lib/spank_pliant.so");
    let mut bytes = std::fs::read(&plugin).unwrap();
    let at = pliant_tests::select::symbol(&plugin, &bytes, "plugin_version");
    let own = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    // Major and minor in the upper halves: 23.02 for 22.05, and so on.
    bytes[at..at + 4].copy_from_slice(&(own + 0x1_0000).to_le_bytes());
    std::fs::remove_file(&plugin).unwrap(); // a new file: the old one is mapped by slurmd
    std::fs::write(&plugin, bytes).unwrap();
    let plain = lab.run(lab.user(0), &["sbatch", "--gpus=1", "--wrap", "true", "--parsable"]).unwrap();
    let job = pliant_model::JobId(plain.trim().parse().unwrap());
    assert_eq!(lab.wait_end(job, WAIT).unwrap(), "COMPLETED");
    let used = lab.run(lab.user(0), &["sbatch", "--elastic=4", "--gpus=1", "--wrap", "true"]).unwrap_err().to_string();
    assert!(used.contains("elastic"), "the option is not there: {used}");
    let doctor = lab.command(lab.user(0), "pliant").unwrap().args(["doctor"]).output().unwrap();
    let text = String::from_utf8_lossy(&doctor.stdout).into_owned();
    let line = text.lines().find(|l| l.contains("spank_pliant.so") || l.contains("plugin")).unwrap_or_default();
    assert!(text.contains("ncompatible") || line.contains("FAIL"), "{text}");
    assert_eq!(doctor.status.code(), Some(1));
}
