//! What users type: flags, twins and nonsense, in sbatch, salloc and srun.

use pliant_lab::Lab;
use pliant_tests::{Options, Training};
use std::process::Output;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// One lab for all tests of this file; it ends with the process.
static LAB: LazyLock<Lab> = LazyLock::new(|| Lab::builder().nodes(2).gpus(4).poll_interval(1).start().unwrap());
const WAIT: Duration = Duration::from_secs(30);

fn run(program: &str, args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = LAB.command(LAB.user(0), program).unwrap();
    command.args(args).envs(env.iter().copied()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What a job sees of ours, one `NAME=value` a line.
fn seen_by_job(args: &[&str], env: &[(&str, &str)]) -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let out = LAB.home(LAB.user(0)).join(format!("env-{number}"));
    let path = format!("--output={}", out.display());
    let mut all = vec!["--wait", "-Q", path.as_str()];
    all.extend_from_slice(args);
    // The lab itself sets PLIANT_CONFIG and PLIANT_LAB_DIR.
    all.extend_from_slice(&["--wrap", "env | grep -E '^PLIANT_(JOB|ELASTIC)' | sort || true"]);
    let output = run("sbatch", &all, env);
    assert!(output.status.success(), "{}", text(&output.stderr));
    std::fs::read_to_string(&out).unwrap()
}

#[test]
fn the_options_are_in_every_help() {
    for program in ["sbatch", "salloc", "srun"] {
        let help = text(&run(program, &["--help"], &[]).stdout);
        for option in ["--elastic=", "--elastic-grace=", "--elastic-locality="] {
            // A long option has its text on the next line.
            let line: String = help.lines().skip_while(|l| !l.contains(option)).take(2).collect();
            assert!(line.contains("[pliant]"), "{program}: {option}: {line:?}");
        }
    }
}

#[test]
fn nonsense_stops_the_submission_with_one_line() {
    let long = "8".repeat(100_000);
    let texts = ["16-4", "0", "-1", "4294967296", "4-16:0", "8\n", "$(id)", "", long.as_str()];
    for bad in texts {
        let flag = format!("--elastic={bad}");
        for (args, env) in [(vec![flag.as_str()], vec![]), (vec![], vec![("PLIANT_ELASTIC", bad)])] {
            if bad.is_empty() && args.is_empty() {
                continue; // an empty twin is no twin
            }
            let mut all = args.clone();
            all.extend_from_slice(&["--gpus=1", "--wrap", "true"]);
            let output = run("sbatch", &all, &env);
            let stderr = text(&output.stderr);
            let shown: String = bad.chars().take(20).collect();
            assert!(!output.status.success(), "{shown:?} was accepted");
            assert!(stderr.contains("elastic") || stderr.contains("ELASTIC"), "{shown:?}: {stderr}");
            assert!(stderr.contains("[MIN-]MAX[:STEP]"), "{shown:?}: {stderr}");
            assert!(stderr.len() < 1000 && stderr.lines().count() <= 2, "{shown:?}: {stderr}");
        }
    }
    for (flag, grammar) in [("--elastic-grace=soon", "minutes"), ("--elastic-locality=rack", "node")] {
        let output = run("sbatch", &["--elastic=2", flag, "--gpus=1", "--wrap", "true"], &[]);
        assert!(!output.status.success() && text(&output.stderr).contains(grammar), "{flag}: {}", text(&output.stderr));
    }
}

#[test]
fn a_flag_beats_its_twin_and_the_last_flag_wins() {
    let job = |args: &[&str], env: &[(&str, &str)]| seen_by_job(&[&["--gpus=1"], args].concat(), env);
    assert!(job(&[], &[("PLIANT_ELASTIC", "3")]).contains("PLIANT_JOB_ELASTIC=3"));
    assert!(job(&["--elastic=2"], &[("PLIANT_ELASTIC", "3")]).contains("PLIANT_JOB_ELASTIC=2"));
    assert!(job(&["--elastic=2", "--elastic=4"], &[]).contains("PLIANT_JOB_ELASTIC=4"));
    let all = job(&["--elastic=1-4", "--elastic-grace=1:30", "--elastic-locality=node"], &[]);
    assert!(all.contains("PLIANT_JOB_ELASTIC_GRACE=90"), "{all}");
    assert!(all.contains("PLIANT_JOB_ELASTIC_LOCALITY=node"), "{all}");
    let exported = job(&["--elastic=2", "--export=NONE"], &[]);
    assert!(exported.contains("PLIANT_JOB_ELASTIC=2"), "--export=NONE: {exported}");
    assert!(!job(&["--elastic=2"], &[("PLIANT_ELASTIC", "3")]).contains("PLIANT_ELASTIC="), "no input reaches the job");
}

#[test]
fn without_a_flag_nothing_is_there() {
    assert_eq!(seen_by_job(&["--gpus=1"], &[]), "");
}

#[test]
fn srun_and_salloc_take_them_too() {
    let output = run("srun", &["--elastic=2", "--gpus=1", "env"], &[]);
    assert!(text(&output.stdout).contains("PLIANT_JOB_ELASTIC=2"), "{}", text(&output.stderr));
    let output = run("salloc", &["--elastic=2", "--gpus=1", "srun", "env"], &[]);
    assert!(text(&output.stdout).contains("PLIANT_JOB_ELASTIC=2"), "{}", text(&output.stderr));
}

/// A range that does not fit the allocation ends before anything is started, with the documented code.
#[test]
fn a_range_that_does_not_fit_is_refused_by_pliant_run() {
    for (elastic, sbatch, why) in [
        ("3-4", ["--gpus=2", "--nodes=1"], "MIN"),
        ("1", ["--gpus=2", "--nodes=1"], "MAX"),
        ("2-64", ["--gpus=2", "--nodes=1"], "MAX"),
    ] {
        let job = Training::submit(&LAB, &Options::default().elastic(elastic).sbatch(&sbatch)).unwrap();
        LAB.wait_end(job.job, WAIT).unwrap();
        let code = LAB.run("root", &["scontrol", "show", "job", &job.job.to_string()]).unwrap();
        assert!(code.contains("ExitCode=64:0"), "{elastic}: {code}");
        assert!(job.text().contains(&format!("--elastic={elastic}")) && job.text().contains(why), "{}", job.text());
        assert!(job.events().is_empty(), "something was started");
    }
}

/// 1 MiB of text in a line of the script.
#[test]
fn a_mebibyte_of_text_stops_the_submission_with_one_line() {
    let script = LAB.home(LAB.user(0)).join("mebibyte.sh");
    let text = format!("#!/bin/bash\n#SBATCH --gpus=1\n#SBATCH --elastic={}\ntrue\n", "8".repeat(1 << 20));
    std::fs::write(&script, text).unwrap();
    let output = run("sbatch", &[&script.to_string_lossy()], &[]);
    let stderr = self::text(&output.stderr);
    assert!(!output.status.success() && stderr.contains("[MIN-]MAX[:STEP]"), "{}", stderr.len());
    assert!(stderr.len() < 1000, "{} bytes", stderr.len());
}

/// Case B46 in files: the same flags as #SBATCH lines.
#[test]
fn sbatch_lines_in_the_script_count() {
    let home = LAB.home(LAB.user(0));
    let (script, out) = (home.join("lines.sh"), home.join("lines.out"));
    let lines = "#!/bin/bash\n#SBATCH --gpus=1\n#SBATCH --elastic=1-3\nenv | grep ^PLIANT_JOB_ELASTIC=\n";
    std::fs::write(&script, lines).unwrap();
    let path = format!("--output={}", out.display());
    let output = run("sbatch", &["--wait", &path, &script.to_string_lossy()], &[("PLIANT_ELASTIC", "2")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(std::fs::read_to_string(&out).unwrap().trim(), "PLIANT_JOB_ELASTIC=1-3");
}

/// A nested submission from inside an elastic job is a plain job.
#[test]
fn a_nested_submission_is_plain() {
    let home = LAB.home(LAB.user(0));
    let (script, out) = (home.join("nested.sh"), home.join("nested.out"));
    let inner = format!("sbatch -Q --wait --output={} --wrap 'env | grep -c ^PLIANT_JOB'", out.display());
    std::fs::write(&script, format!("#!/bin/bash\n{inner}\n")).unwrap();
    let args = ["--wait", "-Q", "--gpus=1", "--elastic=1-3", "--output=/dev/null", &script.to_string_lossy()];
    run("sbatch", &args, &[]);
    assert_eq!(std::fs::read_to_string(&out).unwrap().trim(), "0");
}
