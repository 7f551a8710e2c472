//! What Slurm is configured to do: from slurmctld (`scontrol show config`), else from slurm.conf itself.

use super::{LIMIT, fail, ok, warn};
use crate::command;
use pliant_protocol::admin::Finding;
use pliant_protocol::config::Config;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where slurm.conf may be, after what pliant.toml and SLURM_CONF say; the second is that of a host without a file.
const PLACES: [&str; 3] = ["/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf"];

/// Slurm's configuration as far as the checks need it.
#[derive(Clone, Debug)]
pub struct Facts {
    /// By key in lower case.
    keys: BTreeMap<String, String>,
    /// slurm.conf, where one was found.
    pub conf: Option<PathBuf>,
    /// Why slurmctld did not say.
    pub unreachable: Option<String>,
    /// `slurm-wlm 22.05.8` of this host's commands.
    pub commands: Result<String, String>,
    /// cgroup.conf and gres.conf beside slurm.conf, where they can be read.
    pub files: BTreeMap<&'static str, String>,
}

impl Default for Facts {
    fn default() -> Self {
        let commands = Err("not asked".to_owned());
        Facts { keys: BTreeMap::new(), conf: None, unreachable: None, commands, files: BTreeMap::new() }
    }
}

impl Facts {
    /// A value; `None` where it is unset.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.keys.get(&key.to_lowercase()).map(String::as_str)
    }

    /// The release of slurmctld.
    pub fn version(&self) -> Option<&str> {
        self.get("SLURM_VERSION")
    }

    /// Whether slurm.conf names this host as a controller.
    pub fn is_controller(&self, own: &str) -> bool {
        let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
        self.keys.iter().any(|(key, value)| {
            let host = value.split('(').next().unwrap_or_default();
            key.starts_with("slurmctldhost") && (host == own || short(host) == short(own))
        })
    }

    /// `/dir/name` for a file that lies beside slurm.conf.
    pub fn beside(&self, name: &str) -> Option<PathBuf> {
        Some(self.conf.as_deref()?.parent()?.join(name))
    }
}

/// A command of Slurm that reads the configured slurm.conf.
pub fn command(config: &Config, program: &str, arguments: &[&str]) -> Command {
    let mut command = command::command(program, arguments);
    if !config.slurm.conf.as_os_str().is_empty() {
        command.env("SLURM_CONF", &config.slurm.conf);
    }
    command
}

/// Asks slurmctld and reads the files.
pub fn gather(config: &Config) -> Facts {
    let mut facts = Facts {
        commands: super::output(&mut command(config, "scontrol", &["--version"]), b"").map(|t| t.trim().to_owned()),
        ..Facts::default()
    };
    let shown = command::run(&mut command(config, "scontrol", &["show", "config"]), b"", LIMIT);
    match shown {
        Ok(done) if done.status.success() => facts.keys = parse(&done.text()),
        Ok(done) => facts.unreachable = Some(done.complaint()),
        Err(e) => facts.unreachable = Some(e.to_string()),
    }
    let named = Some(config.slurm.conf.clone()).filter(|p| !p.as_os_str().is_empty());
    let from_environment = std::env::var_os("SLURM_CONF").map(PathBuf::from);
    let shown = facts.get("SLURM_CONF").map(PathBuf::from);
    let places = named.or(from_environment).or(shown).into_iter().chain(PLACES.map(PathBuf::from));
    facts.conf = places.into_iter().find(|p| p.is_file());
    if facts.unreachable.is_some() {
        facts.keys = facts.conf.as_deref().map(|p| read(p, 0)).unwrap_or_default();
    }
    for name in ["cgroup.conf", "gres.conf"] {
        if let Some(text) = facts.beside(name).and_then(|p| std::fs::read_to_string(p).ok()) {
            facts.files.insert(name, text);
        }
    }
    facts
}

/// `Key = value` and `Key=value` lines; the first of a key counts, `(null)` is unset.
pub fn parse(text: &str) -> BTreeMap<String, String> {
    let mut keys = BTreeMap::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default();
        if let Some((key, value)) = line.split_once('=') {
            let value = value.trim();
            if !value.is_empty() && value != "(null)" {
                keys.entry(key.trim().to_lowercase()).or_insert_with(|| value.to_owned());
            }
        }
    }
    keys
}

/// slurm.conf with its includes, at most 8 deep.
fn read(path: &Path, depth: u8) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut keys = parse(&text);
    let included = text.lines().filter_map(|line| {
        let (word, file) = line.trim().split_once(char::is_whitespace)?;
        word.eq_ignore_ascii_case("include").then(|| path.with_file_name(file.trim()))
    });
    for file in included.filter(|_| depth < 8) {
        for (key, value) in read(&file, depth + 1) {
            keys.entry(key).or_insert(value);
        }
    }
    keys
}

/// `(22, 5)` of `slurm-wlm 22.05.8`.
pub fn release(text: &str) -> Option<(u32, u32)> {
    let version = text.split_ascii_whitespace().last()?;
    let mut parts = version.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The checks of Slurm's own configuration.
pub fn check(facts: &Facts) -> Vec<Finding> {
    let mut all = vec![versions(facts)];
    if facts.keys.is_empty() {
        all.push(fail(
            "slurm.conf",
            "neither slurmctld nor a file says how Slurm is configured",
            "set slurm.conf in pliant.toml, or SLURM_CONF",
        ));
        return all;
    }
    all.push(match facts.get("SelectType") {
        Some("select/cons_tres") => ok("SelectType", "select/cons_tres"),
        other => fail(
            "SelectType",
            other.unwrap_or("not set"),
            "GPUs need SelectType=select/cons_tres in slurm.conf (slurmctld has to be restarted)",
        ),
    });
    all.push(match facts.get("GresTypes") {
        Some(types) if types.split(',').any(|t| t.trim() == "gpu") => ok("GresTypes", types),
        other => fail("GresTypes", other.unwrap_or("not set"), "add GresTypes=gpu to slurm.conf"),
    });
    all.push(topology(facts));
    all.push(devices(facts));
    all.push(match facts.get("AccountingStorageType") {
        Some("accounting_storage/slurmdbd") => ok("slurmdbd", "in use"),
        other => warn(
            "slurmdbd",
            other.unwrap_or("not set"),
            "without slurmdbd nobody can be given operator rights: pliantd can only ask, the agents cancel as root",
        ),
    });
    all
}

fn versions(facts: &Facts) -> Finding {
    let name = "Slurm version";
    let commands = match &facts.commands {
        Ok(text) => text,
        Err(why) if why.ends_with("not found") => {
            return fail(name, why.clone(), "install Slurm's client commands (Debian: slurm-client)");
        }
        Err(why) => {
            return fail(
                name,
                why.clone(),
                "the commands find no slurm.conf: set SLURM_CONF, or slurm.conf in pliant.toml",
            );
        }
    };
    match (facts.version(), &facts.unreachable) {
        (Some(version), _) if release(version) == release(commands) => {
            ok(name, format!("commands {commands}, slurmctld {version}"))
        }
        (Some(version), _) => warn(
            name,
            format!("commands {commands}, slurmctld {version}"),
            "works while Slurm supports the mix; Pliant's plugin and bridge have to fit what is beside them",
        ),
        (None, Some(why)) => fail(
            name,
            format!("commands {commands}; slurmctld does not answer: {why}"),
            "see scontrol ping; the checks below are made on slurm.conf itself",
        ),
        (None, None) => warn(name, format!("commands {commands}; slurmctld does not say"), "see scontrol show config"),
    }
}

/// Without cores there is no GRES topology, and Slurm ignores `Links=`.
fn topology(facts: &Facts) -> Finding {
    let name = "gres.conf";
    let Some(text) = facts.files.get("gres.conf") else {
        return warn(
            name,
            "not readable here",
            "see on a GPU node that its GPU lines have Cores= or AutoDetect=nvml; else Slurm ignores how GPUs are linked",
        );
    };
    let lines = text.lines().map(|l| l.split('#').next().unwrap_or_default().to_lowercase());
    let (mut gpus, mut bare) = (0, 0);
    for line in lines {
        let detects = line.contains("autodetect=") && !line.contains("autodetect=off");
        if detects {
            return ok(name, "AutoDetect is on");
        }
        if line.contains("name=gpu") {
            gpus += 1;
            bare += i32::from(!line.contains("cores="));
        }
    }
    match (gpus, bare) {
        (0, _) => {
            warn(name, "has no line with Name=gpu", "add one for each GPU, with File= and Cores=, or AutoDetect=nvml")
        }
        (_, 0) => ok(name, "all GPU lines have Cores="),
        _ => warn(
            name,
            format!("{bare} of {gpus} GPU lines have no Cores="),
            "without it Slurm ignores Links= and the sockets of the GPUs: add Cores= or AutoDetect=nvml",
        ),
    }
}

fn devices(facts: &Facts) -> Finding {
    let name = "device cgroups";
    let task = facts.get("TaskPlugin").unwrap_or_default();
    let file = facts.files.get("cgroup.conf").map(|t| parse(t)).unwrap_or_default();
    let constrain = facts.get("ConstrainDevices").or_else(|| file.get("constraindevices").map(String::as_str));
    let on = constrain.is_some_and(|v| v.eq_ignore_ascii_case("yes"));
    if task.contains("task/cgroup") && on {
        return ok(name, "ConstrainDevices=yes: jobs open no GPUs but their own");
    }
    warn(
        name,
        format!("TaskPlugin={task}, ConstrainDevices={}", constrain.unwrap_or("not set")),
        "a job can open the GPUs of others: TaskPlugin=task/cgroup in slurm.conf, ConstrainDevices=yes in cgroup.conf",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use pliant_protocol::admin::Level;

    fn facts(conf: &str, gres: &str) -> Facts {
        Facts {
            keys: parse(conf),
            commands: Ok("slurm-wlm 22.05.8".into()),
            files: BTreeMap::from([("gres.conf", gres.to_owned())]),
            ..Facts::default()
        }
    }

    fn level(facts: &Facts, check: &str) -> Level {
        super::check(facts).into_iter().find(|f| f.check == check).unwrap().level
    }

    #[test]
    fn both_forms_of_the_configuration_are_read() {
        let keys = parse(
            "Configuration data as of now\nAuthInfo    = socket=/m.sock\nEpilog = (null)\n# a=b\nGresTypes=gpu # c\n",
        );
        assert_eq!(keys.get("authinfo").map(String::as_str), Some("socket=/m.sock"));
        assert_eq!(keys.get("grestypes").map(String::as_str), Some("gpu"));
        assert_eq!(keys.len(), 2);
    }

    #[test]
    fn controllers_are_known_by_name() {
        let facts = facts("SlurmctldHost[0] = head1.site(10.0.0.1)\nSlurmctldHost[1] = head2", "");
        assert!(facts.is_controller("head1") && facts.is_controller("head2.site"));
        assert!(!facts.is_controller("login1") && !facts.is_controller("head"));
    }

    #[test]
    fn a_good_configuration_passes() {
        let good = facts(
            "SLURM_VERSION = 22.05.8\nSelectType=select/cons_tres\nGresTypes=gpu\nTaskPlugin=task/affinity,task/cgroup\n\
             ConstrainDevices = yes\nAccountingStorageType=accounting_storage/slurmdbd",
            "Name=gpu File=/dev/nvidia0 Cores=0-3\n",
        );
        assert!(super::check(&good).iter().all(|f| f.level == Level::Ok), "{:?}", super::check(&good));
    }

    #[test]
    fn what_is_wrong_is_found() {
        let bad = facts(
            "SLURM_VERSION = 24.11.5\nSelectType=select/linear\nTaskPlugin=task/none\nAccountingStorageType=accounting_storage/none",
            "NodeName=n1 Name=gpu File=/dev/nvidia0\nName=gpu File=/dev/nvidia1 Cores=1\n",
        );
        assert_eq!(level(&bad, "SelectType"), Level::Fail);
        assert_eq!(level(&bad, "GresTypes"), Level::Fail);
        for noted in ["Slurm version", "gres.conf", "device cgroups", "slurmdbd"] {
            assert_eq!(level(&bad, noted), Level::Warn, "{noted}");
        }
        assert_eq!(topology(&bad).found, "1 of 2 GPU lines have no Cores=");
        assert_eq!(
            level(&Facts { commands: Err("scontrol: not found".into()), ..Facts::default() }, "Slurm version"),
            Level::Fail
        );
    }

    #[test]
    fn releases() {
        assert_eq!(release("slurm-wlm 22.05.8"), Some((22, 5)));
        assert_eq!(release("slurm 24.11.5-1"), Some((24, 11)));
        assert_eq!(release("slurm"), None);
    }
}
