//! The plugins inside Slurm's processes when something is wrong with the plugins themselves: a panic in any exported
//! function, a build for another release, structures that are not what they were, a daemon that dies in the middle.
//!
//! `./dev test` builds the variants: `inject/` beside the programs.

use pliant_lab::{Lab, Signal};
use pliant_tests::select::{Events, all_free, symbol};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(60);

/// A variant that `./dev test` has built, if it has.
fn variant(lab: &Lab, name: &str) -> Option<PathBuf> {
    let path = lab.spec().plugins.join("../inject/debug").join(name);
    if !path.is_file() {
        eprintln!("skipped: {} is not built (`./dev test` builds it)", path.display());
        return None;
    }
    Some(path)
}

/// Puts another file in a plugin's place: a new one, since the old one is mapped.
fn put(from: &Path, to: &Path) {
    let _ = std::fs::remove_file(to);
    std::fs::copy(from, to).unwrap();
}

fn select(lab: &Lab) -> PathBuf {
    lab.dir().join("plugins/select_cons_tres.so")
}

fn log(lab: &Lab) -> String {
    std::fs::read_to_string(lab.log("slurmctld")).unwrap()
}

fn exports(of: &Path) -> Vec<String> {
    let nm = Command::new("nm").args(["-D", "--defined-only"]).arg(of).output().unwrap();
    let text = String::from_utf8(nm.stdout).unwrap();
    let functions = text.lines().filter(|l| l.contains(" T "));
    functions.filter_map(|l| l.split_whitespace().last()).map(str::to_owned).collect()
}

/// Whether a job runs and gets its GPUs, and slurmctld does everything else that a select plugin is asked for.
fn works(lab: &Lab, what: &str) {
    // After a restart nodes are there once they have answered.
    lab.wait_for(WAIT, "nodes are idle", || {
        let states = lab.run("root", &["sinfo", "-h", "-N", "-o", "%T"]).unwrap_or_default();
        !states.is_empty() && states.lines().all(|s| s == "idle")
    })
    .unwrap_or_else(|e| panic!("{what}: {e:#}"));
    let devices = lab.run(lab.user(0), &["srun", "--gres=gpu:2", "printenv", "CUDA_VISIBLE_DEVICES"]);
    let devices = devices.unwrap_or_else(|e| panic!("{what}: {e:#}\n{}", lab.logs(10)));
    assert_eq!(devices.trim().split(',').count(), 2, "{what}: {devices}");
    for argv in [&["scontrol", "ping"][..], &["sinfo", "-N"], &["squeue"], &["scontrol", "show", "nodes"]] {
        lab.run("root", argv).unwrap_or_else(|e| panic!("{what}: {e:#}"));
    }
}

#[test]
fn a_panic_in_any_function_of_the_select_plugin_leaves_plain_slurm() {
    let lab = Lab::builder().nodes(1).gpus(4).start().unwrap();
    if !lab.spec().select {
        eprintln!("skipped: the select plugin is not built for this release of Slurm");
        return;
    }
    let Some(file) = variant(&lab, "libselect_pliant.so") else { return };
    let mut names = exports(&file);
    assert!(names.len() >= 14, "{names:?}");
    names.extend(
        ["init:stock", "select_p_job_test:after", "select_p_job_fini:after", "select_p_select_nodeinfo_set:after"]
            .map(str::to_owned),
    );
    put(&file, &select(&lab));
    for name in &names {
        if lab.process("slurmctld").is_some() {
            lab.stop("slurmctld").unwrap();
        }
        let before = log(&lab).len();
        lab.start_with("slurmctld", &[("PLIANT_INJECT_PANIC", name)]).unwrap_or_else(|e| panic!("{name}: {e:#}"));
        works(&lab, name);
        let told = log(&lab).split_off(before);
        let lines = told.lines().filter(|l| l.contains("internal error, plugin disabled")).count();
        assert!(lines <= 1, "{name}: {told}");
        if ["select_p_job_test", "select_p_job_begin", "init", "select_p_reconfigure"].contains(&name.as_str()) {
            assert!(lines == 1 && told.contains(&format!("pliant: {name}: internal error")), "{name}: {told}");
        }
        // Clients of releases before 25.05 load the plugin too.
        let client = lab.command(lab.user(0), "sinfo").unwrap().env("PLIANT_INJECT_PANIC", name).output().unwrap();
        assert!(client.status.success(), "{name}: {}", String::from_utf8_lossy(&client.stderr));
    }
    all_free(&lab).unwrap();
}

#[test]
fn a_panic_in_any_function_of_the_spank_plugin_leaves_plain_slurm() {
    let lab = Lab::builder().nodes(1).gpus(4).start().unwrap();
    let Some(file) = variant(&lab, "libspank_pliant.so") else { return };
    put(&file, &lab.dir().join("lib/spank_pliant.so"));
    let plugstack = lab.dir().join("etc/plugstack.conf");
    let optional = std::fs::read_to_string(&plugstack).unwrap();
    for kind in ["optional", "required"] {
        std::fs::write(&plugstack, optional.replace("optional", kind)).unwrap();
        for name in ["slurm_spank_init", "slurm_spank_init_post_opt", "option_callback"] {
            let env = [("PLIANT_INJECT_PANIC", name)];
            lab.stop("slurmd.n0").unwrap();
            lab.start_with("slurmd.n0", &env).unwrap();
            lab.wait_for(WAIT, "n0 is back", || {
                lab.run("root", &["sinfo", "-h", "-o", "%T"]).is_ok_and(|s| s.trim() == "idle")
            })
            .unwrap();
            for argv in [
                &["srun", "--gres=gpu:1", "true"][..],
                &["srun", "--elastic=2", "--gres=gpu:1", "true"],
                &["salloc", "--gres=gpu:1", "true"],
                &["sbatch", "--wait", "--gres=gpu:1", "--wrap", "true"],
            ] {
                let mut command = lab.command(lab.user(0), "timeout").unwrap();
                let out = command.arg("60").args(argv).env(env[0].0, env[0].1).output().unwrap();
                let told = String::from_utf8_lossy(&out.stderr);
                // Where the flag is not registered it is not known: the one thing that cannot be as without the plugin.
                let unknown = argv.contains(&"--elastic=2") && name == "slurm_spank_init";
                assert!(out.status.success() || unknown, "{kind} {name} {argv:?}: {told}");
                assert!(told.matches("internal error").count() <= 1, "{kind} {name} {argv:?}: {told}");
            }
            assert!(lab.process("slurmd.n0").is_some());
        }
    }
}

/// A build for another micro of the same line: refused, and both versions are named.
#[test]
fn a_select_plugin_of_another_micro_is_refused_with_both_versions() {
    let lab = Lab::builder().nodes(1).gpus(4).start().unwrap();
    if !lab.spec().select {
        eprintln!("skipped: the select plugin is not built for this release of Slurm");
        return;
    }
    let plugin = select(&lab);
    let mut bytes = std::fs::read(&plugin).unwrap();
    let at = symbol(&plugin, &bytes, "plugin_version");
    let own = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    bytes[at..at + 4].copy_from_slice(&(own + 1).to_le_bytes());
    lab.stop("slurmctld").unwrap();
    std::fs::remove_file(&plugin).unwrap();
    std::fs::write(&plugin, bytes).unwrap();
    let before = log(&lab).len();
    let started = lab.start("slurmctld");
    let told = log(&lab).split_off(before);
    let text = |v: u32| format!("{}.{:02}.{}", (v >> 16) & 0xff, (v >> 8) & 0xff, v & 0xff);
    // Slurm itself looks at the number before it calls anything.
    assert!(told.contains(&text(own + 1)) || told.contains("ncompatible"), "{}: {told}", text(own + 1));
    if started.is_ok() {
        works(&lab, "another micro");
    }
    std::fs::remove_file(&plugin).unwrap();
    if lab.process("slurmctld").is_none() {
        lab.start("slurmctld").unwrap();
    }
    works(&lab, "an empty directory");
}

/// B53: built against headers whose job record is another one, it hands calls on and says so once.
#[test]
fn another_layout_is_noticed_before_anything_is_read() {
    let lab = Lab::builder().nodes(1).gpus(4).poll_interval(1).start().unwrap();
    if !lab.spec().select {
        eprintln!("skipped: the select plugin is not built for this release of Slurm");
        return;
    }
    let Some(file) = variant(&lab, "shifted/libselect_pliant.so") else { return };
    lab.stop("slurmctld").unwrap();
    put(&file, &select(&lab));
    let before = log(&lab).len();
    lab.start("slurmctld").unwrap();
    (0..3).for_each(|_| works(&lab, "a shifted record"));
    let told = log(&lab).split_off(before);
    assert_eq!(told.matches("does not know this slurmctld").count(), 1, "{told}");
    lab.wait_for(WAIT, "pliantd says so", || {
        lab.run("root", &["pliant", "status"]).is_ok_and(|s| s.contains("only hands calls on"))
    })
    .unwrap();
    all_free(&lab).unwrap();
}

/// pliantd is stopped, killed while it writes, and started again while jobs come and go: slurmctld never waits.
#[test]
fn slurmctld_never_waits_for_pliantd() {
    let lab = Lab::builder().nodes(2).gpus(8).poll_interval(1).start().unwrap();
    if !lab.spec().select {
        eprintln!("skipped: the select plugin is not built for this release of Slurm");
        return;
    }
    for round in 0..6 {
        match round % 3 {
            0 => lab.signal("pliantd", Signal::STOP).unwrap(),
            1 => lab.kill("pliantd").unwrap(),
            _ => {}
        }
        for _ in 0..5 {
            works(&lab, "without pliantd");
        }
        match round % 3 {
            0 => lab.signal("pliantd", Signal::CONT).unwrap(),
            1 => lab.start("pliantd").unwrap(),
            _ => {}
        }
    }
    let mut events = Events::of(&lab).unwrap();
    works(&lab, "at the end");
    assert!(!events.read().unwrap().is_empty());
    all_free(&lab).unwrap();
}

/// Slurm's own commands with the SPANK plugin under valgrind: no byte is read or written that is not ours.
#[test]
fn valgrind_finds_nothing_in_commands_with_the_spank_plugin() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("skipped: valgrind is not installed (`./dev test` installs it)");
        return;
    }
    let lab = Lab::builder().nodes(1).gpus(4).start().unwrap();
    let watched = ["valgrind", "-q", "--error-exitcode=99", "--log-file=valgrind.log"];
    let cases: [&[&str]; 4] = [
        &["sbatch", "--gpus=1", "--elastic=2-4:5m", "--elastic-grace=10", "--wrap", "true"],
        &["sbatch", "--gpus=1", "--wrap", "true"],
        &["srun", "--gpus=1", "--elastic=2", "true"],
        &["salloc", "--gpus=1", "--elastic-locality=node", "true"],
    ];
    for case in cases {
        let told = lab.run_within(WAIT, lab.user(0), &[&watched, case].concat());
        let found = std::fs::read_to_string(lab.home(lab.user(0)).join("valgrind.log")).unwrap_or_default();
        // A wrong option is an error of the command's own, and no less work for the plugin.
        let own = told.as_ref().err().is_some_and(|e| !e.to_string().contains("status: 99"));
        assert!(told.is_ok() || own, "{case:?}: {told:?}\n{found}");
        assert!(!found.contains("Invalid") && !found.contains("uninitialised"), "{case:?}: {found}");
    }
}
