//! The exit codes and the first words of each refusal, as a shell sees them.

use pliant_protocol::exit;
use std::process::Command;

#[allow(clippy::expect_used)] // clippy allows it in #[test] functions only
fn pliant(arguments: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pliant"));
    command.env_remove("PLIANT_CONFIG").env_remove("SLURM_JOB_ID").envs(environment.iter().copied());
    let done = command.args(arguments).output().expect("pliant runs");
    (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
}

#[test]
fn bad_usage_is_2() {
    let code = Some(i32::from(exit::USAGE));
    for arguments in [
        &[][..],
        &["frobnicate"],
        &["explain"],
        &["explain", "x"],
        &["run"],
        &["run", "--lable", "true"],
        &["jobs", "--json", "--noheader"],
    ] {
        assert_eq!(pliant(arguments, &[]).0, code, "{arguments:?}");
    }
    for arguments in [&["--help"][..], &["--version"], &["explain", "--help"]] {
        assert_eq!(pliant(arguments, &[]).0, Some(i32::from(exit::OK)), "{arguments:?}");
    }
}

#[test]
fn an_absent_daemon_is_1_and_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let (file, socket) = (dir.path().join("pliant.toml"), dir.path().join("none.sock"));
    std::fs::write(&file, format!("[daemon]\nsocket = {socket:?}\n")).unwrap();
    let file = file.to_str().unwrap();
    for arguments in [&["status"][..], &["jobs", "--json"], &["explain", "12"]] {
        let by_flag = pliant(&[&["--config", file], arguments].concat(), &[]);
        assert_eq!(by_flag, pliant(arguments, &[("PLIANT_CONFIG", file)]));
        assert_eq!(by_flag.0, Some(i32::from(exit::FAILURE)));
        let start =
            format!("pliant: no pliantd at {} (No such file or directory (os error 2)): is the", socket.display());
        assert!(by_flag.1.starts_with(&start) && by_flag.1.lines().count() == 1, "{}", by_flag.1);
    }
}

#[test]
fn a_configuration_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pliant.toml");
    let name = file.to_str().unwrap();
    assert_eq!(pliant(&["config", "check", name], &[]).0, Some(i32::from(exit::FAILURE)));
    std::fs::write(&file, "[elastic]\ngrace = 30\n").unwrap();
    assert_eq!(pliant(&["config", "check", name], &[]), (Some(i32::from(exit::OK)), String::new()));
    std::fs::write(&file, "[elastic]\ngrase = 30\n").unwrap();
    let (code, text) = pliant(&["--config", name, "config", "check"], &[]);
    let expected = format!("pliant: {name}: unknown key \"elastic.grase\", did you mean \"elastic.grace\"?\n");
    assert_eq!((code, text), (Some(i32::from(exit::FAILURE)), expected));
}

#[test]
fn outside_a_job_there_is_no_world() {
    let (code, text) = pliant(&["run", "--", "true"], &[]);
    assert_eq!(code, Some(i32::from(exit::NO_WORLD)), "{text}");
    assert!(text.starts_with("pliant: ") && text.lines().count() == 1, "{text}");
    // The same by way of --config, which starts the program again.
    assert_eq!(pliant(&["run", "--config", "/nonexistent.toml", "--", "true"], &[]).0, code);
}
