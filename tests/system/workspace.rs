//! The shape of the workspace: which crate may depend on which.

use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;

/// The designed edges: crate -> what it may depend on. These and their closure; any other edge is a fault.
const EDGES: &[(&str, &[&str])] = &[
    ("pliant-model", &[]),
    ("pliant-policy", &["pliant-model"]),
    ("pliant-protocol", &["pliant-model"]),
    ("pliantd", &["pliant-policy", "pliant-protocol", "pliant-munge"]),
    ("pliant-agent", &["pliant-protocol", "pliant-munge", "pliant-nvml"]),
    ("pliant-launcher", &["pliant-protocol"]),
    ("pliant-cli", &["pliant-protocol", "pliant-launcher"]),
    ("pliant-munge", &[]),
    ("pliant-nvml", &[]),
    ("slurm-sys", &[]),
    ("slurm", &["slurm-sys"]),
    ("pliant-plugin-core", &["pliant-protocol"]),
    ("spank-pliant", &["pliant-plugin-core", "slurm"]),
    ("select-pliant", &["pliant-plugin-core", "slurm"]),
    ("pliant-slurm-bridge", &["pliant-plugin-core", "slurm"]),
];

fn closure(name: &str) -> BTreeSet<&'static str> {
    let direct = EDGES.iter().find(|(n, _)| *n == name).map_or(&[][..], |(_, to)| to);
    direct.iter().flat_map(|to| closure(to).into_iter().chain([*to])).collect()
}

/// In a lab of another release there is no cargo, and nothing of this that could be different.
fn elsewhere() -> bool {
    let inside = std::env::var_os("PLIANT_LAB_RELEASE").is_some();
    if inside {
        eprintln!("skipped: about the source, not about a release of Slurm");
    }
    inside
}

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps"])
        .current_dir(pliant_tests::root())
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

fn texts<'a>(value: &'a Value, key: &str) -> &'a str {
    value.get(key).and_then(Value::as_str).unwrap_or("")
}

#[test]
fn crates_depend_on_each_other_only_as_designed() {
    if elsewhere() {
        return;
    }
    let metadata = metadata();
    let packages = metadata["packages"].as_array().unwrap();
    let ours: BTreeSet<&str> = packages.iter().map(|p| texts(p, "name")).collect();
    for package in packages {
        let name = texts(package, "name");
        if matches!(name, "pliant-lab" | "pliant-tests" | "fake-nvml") {
            continue; // tests/* may depend on anything
        }
        assert!(EDGES.iter().any(|(n, _)| *n == name), "{name} is new: add its edges to the design first");
        let may = closure(name);
        for dependency in package["dependencies"].as_array().unwrap() {
            let on = texts(dependency, "name");
            let dev = texts(dependency, "kind") == "dev";
            assert!(dev || !ours.contains(on) || may.contains(on), "{name} must not depend on {on}");
        }
    }
}

/// What the release-independent side links, by `cargo tree`: no Slurm, and no async in what decides.
#[test]
fn the_middle_is_pure_and_the_daemon_knows_no_slurm_abi() {
    if elsewhere() {
        return;
    }
    let tree = |package: &str| {
        let output = Command::new(env!("CARGO"))
            .args(["tree", "--offline", "--edges=normal", "--prefix=none", "--format={p}", "--package", package])
            .current_dir(pliant_tests::root())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().filter_map(|l| l.split(' ').next().map(str::to_owned)).collect::<BTreeSet<_>>()
    };
    for package in ["pliant-model", "pliant-policy"] {
        for forbidden in ["tokio", "rustix", "libc", "mio", "rusqlite", "slurm"] {
            assert!(!tree(package).contains(forbidden), "{package} links {forbidden}");
        }
    }
    for package in ["pliantd", "pliant-agent", "pliant-launcher", "pliant-cli"] {
        for forbidden in ["slurm", "slurm-sys", "bindgen"] {
            assert!(!tree(package).contains(forbidden), "{package} links {forbidden}");
        }
    }
    for package in ["pliant-launcher", "spank-pliant", "pliant-slurm-bridge"] {
        assert!(!tree(package).contains("tokio"), "{package} links tokio");
    }
}
