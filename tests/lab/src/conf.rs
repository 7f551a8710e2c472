//! The texts of the configuration files.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

use crate::accounts::DATABASE;
use crate::spec::{PLIANT_USER, SLURM_USER, Spec};

/// slurm.conf's keys in order. A later value of the same key replaces the earlier one, as Slurm warns of repeats in
/// every command otherwise.
struct Keys(Vec<(String, String)>);

impl Keys {
    fn set(&mut self, key: &str, value: impl Into<String>) {
        let value = value.into();
        match self.0.iter_mut().find(|(k, _)| k.eq_ignore_ascii_case(key)) {
            Some(entry) => entry.1 = value,
            None => self.0.push((key.to_owned(), value)),
        }
    }
}

/// slurm.conf.
pub fn slurm_conf(spec: &Spec) -> Result<String> {
    let dir = spec.dir.display();
    let mut keys = Keys(Vec::new());
    for (key, value) in [
        ("ClusterName", "lab".to_owned()),
        ("SlurmctldHost", format!("{}(127.0.0.1)", spec.host)),
        ("SlurmctldPort", spec.ports.slurmctld.to_string()),
        ("SlurmUser", SLURM_USER.to_owned()),
        ("SlurmdUser", "root".to_owned()),
        ("AuthType", "auth/munge".to_owned()),
        ("AuthInfo", format!("socket={dir}/munge/munge.sock")),
        ("StateSaveLocation", format!("{dir}/state")),
        ("SlurmdSpoolDir", format!("{dir}/spool/%n")),
        ("SlurmctldPidFile", format!("{dir}/run/slurmctld.pid")),
        ("SlurmdPidFile", format!("{dir}/run/slurmd.%n.pid")),
        ("SlurmctldLogFile", format!("{dir}/log/slurmctld.log")),
        ("SlurmdLogFile", format!("{dir}/log/slurmd.%n.log")),
        ("SlurmctldDebug", "verbose".to_owned()),
        ("SlurmdDebug", "verbose".to_owned()),
        ("SchedulerType", "sched/backfill".to_owned()),
        ("SelectType", "select/cons_tres".to_owned()),
        ("SelectTypeParameters", "CR_Core".to_owned()),
        ("GresTypes", "gpu".to_owned()),
        ("MpiDefault", "none".to_owned()),
        ("MailProg", "/bin/true".to_owned()),
        ("ReturnToService", "2".to_owned()),
        ("SlurmdParameters", "config_overrides".to_owned()),
        ("PropagateResourceLimits", "NONE".to_owned()),
        ("MessageTimeout", "30".to_owned()),
        ("FirstJobId", spec.first_job_id().to_string()),
        ("PlugStackConfig", format!("{dir}/etc/plugstack.conf")),
    ] {
        keys.set(key, value);
    }
    let (track, task) = if spec.cgroups { ("cgroup", "cgroup") } else { ("linuxproc", "none") };
    keys.set("ProctrackType", format!("proctrack/{track}"));
    keys.set("TaskPlugin", format!("task/{task}"));
    if spec.accounting {
        keys.set("AccountingStorageType", "accounting_storage/slurmdbd");
        keys.set("AccountingStorageHost", "127.0.0.1");
        keys.set("AccountingStoragePort", spec.ports.slurmdbd.to_string());
        // The connection to slurmdbd does not use AuthInfo.
        keys.set("AccountingStoragePass", format!("{dir}/munge/munge.sock"));
        keys.set("AccountingStorageTRES", "gres/gpu");
        keys.set("AccountingStorageEnforce", "associations");
    } else {
        keys.set("AccountingStorageType", "accounting_storage/none");
    }
    if spec.preemption.is_some() {
        keys.set("PreemptType", "preempt/partition_prio");
        keys.set("PreemptMode", "CANCEL");
    }
    if spec.select {
        // The empty directory of a host without the plugin does no harm; that of Slurm itself comes second.
        keys.set("PluginDir", format!("{dir}/plugins:{}", plugin_dir()?.display()));
    }
    let mut extra = Vec::new();
    for line in &spec.conf {
        let Some((key, value)) = line.split_once('=') else {
            bail!("'{line}' is no KEY=VALUE line of slurm.conf");
        };
        let key = key.trim();
        if ["nodename", "partitionname", "nodeset", "downnodes"].contains(&key.to_ascii_lowercase().as_str()) {
            extra.push(line.clone());
        } else {
            keys.set(key, value.trim());
        }
    }
    let mut text = String::from("# Written by pliant-lab.\n");
    for (key, value) in &keys.0 {
        text.push_str(&format!("{key}={value}\n"));
    }
    text.push_str(&node_line(spec));
    text.push_str(&partition_lines(spec));
    for line in extra.iter().chain(&spec.partitions) {
        text.push_str(&format!("{line}\n"));
    }
    Ok(text)
}

/// Slurm's own plugin directory, where a distribution has it.
pub fn plugin_dir() -> Result<PathBuf> {
    let roots = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    let dirs = roots.iter().flat_map(|root| ["slurm-wlm", "slurm"].map(|name| Path::new(root).join(name)));
    let found = dirs.into_iter().find(|dir| dir.join("select_cons_tres.so").is_file());
    found.with_context(|| format!("no select_cons_tres.so of Slurm below {}", roots.join(", ")))
}

fn node_line(spec: &Spec) -> String {
    let last = spec.nodes.saturating_sub(1);
    let (names, ports) = if spec.nodes == 1 {
        ("n0".to_owned(), spec.ports.slurmd.to_string())
    } else {
        (format!("n[0-{last}]"), format!("[{}-{}]", spec.ports.slurmd, spec.ports.slurmd + last))
    };
    let cpus = spec.cpus();
    let kind =
        spec.gres.as_deref().and_then(|text| text.split_whitespace().find_map(|word| word.strip_prefix("Type=")));
    let kind = kind.map(|kind| format!("{kind}:")).unwrap_or_default();
    let gres = if spec.gpus > 0 { format!(" Gres=gpu:{kind}{}", spec.gpus) } else { String::new() };
    format!(
        "NodeName={names} NodeHostname={} NodeAddr=127.0.0.1 Port={ports} CPUs={cpus} Boards=1 SocketsPerBoard=2 \
         CoresPerSocket={} ThreadsPerCore=1 RealMemory=1000000{gres}\n",
        spec.host,
        cpus / 2,
    )
}

fn partition_lines(spec: &Spec) -> String {
    match spec.preemption {
        None => "PartitionName=gpu Nodes=ALL Default=YES State=UP MaxTime=INFINITE PriorityTier=1\n".to_owned(),
        Some(grace) => format!(
            "PartitionName=gpu Nodes=ALL Default=YES State=UP MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF\n\
             PartitionName=low Nodes=ALL State=UP MaxTime=INFINITE PriorityTier=1 PreemptMode=CANCEL GraceTime={grace}\n"
        ),
    }
}

/// gres.conf: the first half of the GPUs at the first socket, the others at the second; strong pairs 0-3, 1-2, 4-7, 5-6.
pub fn gres_conf(spec: &Spec) -> String {
    if let Some(text) = &spec.gres {
        return text.replace("{devices}", &spec.devices.display().to_string());
    }
    let half = spec.cpus() / 2;
    let mut text = String::from("# Written by pliant-lab.\n");
    for gpu in 0..spec.gpus {
        let second = gpu >= spec.gpus.div_ceil(2);
        let cores = if second { format!("{half}-{}", 2 * half - 1) } else { format!("0-{}", half - 1) };
        let links: Vec<&str> = (0..spec.gpus)
            .map(|other| {
                let same_socket = (other >= spec.gpus.div_ceil(2)) == second;
                if other == gpu {
                    "-1"
                } else if other == gpu ^ 3 {
                    "4"
                } else if same_socket {
                    "2"
                } else {
                    "1"
                }
            })
            .collect();
        text.push_str(&format!(
            "Name=gpu File={}/gpu{gpu} Cores={cores} Links={}\n",
            spec.devices.display(),
            links.join(",")
        ));
    }
    text
}

/// cgroup.conf.
pub fn cgroup_conf(spec: &Spec, slurm: (u32, u32)) -> String {
    if spec.cgroups {
        "CgroupPlugin=cgroup/v1\nConstrainDevices=yes\nConstrainCores=no\nConstrainRAMSpace=no\n".to_owned()
    } else if slurm >= (24, 5) {
        // Without this slurmd asks for a cgroup file system even when no plugin uses it.
        "CgroupPlugin=disabled\n".to_owned()
    } else {
        "CgroupPlugin=cgroup/v1\n".to_owned()
    }
}

/// plugstack.conf: the plugin if the lab has its own copy of it.
pub fn plugstack_conf(spec: &Spec) -> String {
    let dir = spec.dir.display();
    if spec.path("lib/spank_pliant.so").exists() {
        format!(
            "optional {dir}/lib/spank_pliant.so agent_socket={dir}/run/%n/agent.sock config={dir}/etc/pliant.toml\n"
        )
    } else {
        "# No plugin in this lab.\n".to_owned()
    }
}

/// slurmdbd.conf.
pub fn slurmdbd_conf(spec: &Spec) -> String {
    let dir = spec.dir.display();
    format!(
        "AuthType=auth/munge\nAuthInfo=socket={dir}/munge/munge.sock\nDbdHost=localhost\nDbdAddr=127.0.0.1\nDbdPort={}\n\
         SlurmUser={SLURM_USER}\nLogFile={dir}/log/slurmdbd.log\nPidFile={dir}/run/slurmdbd.pid\nDebugLevel=info\n\
         StorageType=accounting_storage/mysql\nStorageHost=localhost\nStorageUser={SLURM_USER}\nStorageLoc={DATABASE}\n",
        spec.ports.slurmdbd
    )
}

/// pliant.toml.
pub fn pliant_toml(spec: &Spec) -> Result<String> {
    let dir = spec.dir.display();
    let daemon = format!("127.0.0.1:{}", spec.ports.pliantd);
    let quote = |s: String| format!("{s:?}");
    let interval = if spec.poll_interval.fract() == 0.0 {
        format!("{:.0}", spec.poll_interval)
    } else {
        spec.poll_interval.to_string()
    };
    let mut sections: Vec<(String, Vec<(String, String)>)> = Vec::new();
    for (section, key, value) in [
        ("daemon", "state_dir", quote(format!("{dir}/pliantd"))),
        ("daemon", "socket", quote(format!("{dir}/run/pliantd.sock"))),
        ("daemon", "listen", quote(daemon.clone())),
        ("daemon", "bridge", quote(format!("{dir}/bin/pliant-slurm-bridge"))),
        ("daemon", "poll_interval", interval),
        ("daemon", "user", quote(PLIANT_USER.to_owned())),
        ("agent", "socket", quote(format!("{dir}/run/%n/agent.sock"))),
        ("agent", "daemon", quote(daemon)),
        // Never the machine's own: not there unless the lab has a scenario.
        ("agent", "nvml", quote(format!("{dir}/lib/libnvidia-ml.so.1"))),
        ("slurm", "munge_socket", quote(format!("{dir}/munge/munge.sock"))),
        ("slurm", "conf", quote(format!("{dir}/etc/slurm.conf"))),
        ("select", "board", quote(spec.board().display().to_string())),
        ("select", "ring", quote(spec.ring().display().to_string())),
        ("elastic", "grace", "60".to_owned()),
        ("elastic", "grace_max", "600".to_owned()),
    ] {
        set(&mut sections, section, key, value);
    }
    for item in &spec.pliant_set {
        let parsed = item.split_once('=').and_then(|(path, value)| Some((path.trim().rsplit_once('.')?, value.trim())));
        let Some(((section, key), value)) = parsed else {
            bail!("'{item}' is no SECTION.KEY=VALUE for pliant.toml, for example elastic.grace=5");
        };
        set(&mut sections, section, key, toml_value(value));
    }
    let mut text = String::from("# Written by pliant-lab.\n");
    for (section, keys) in &sections {
        text.push_str(&format!("\n[{section}]\n"));
        for (key, value) in keys {
            text.push_str(&format!("{key} = {value}\n"));
        }
    }
    Ok(text)
}

fn set(sections: &mut Vec<(String, Vec<(String, String)>)>, section: &str, key: &str, value: String) {
    let at = match sections.iter().position(|(name, _)| name == section) {
        Some(at) => at,
        None => {
            sections.push((section.to_owned(), Vec::new()));
            sections.len() - 1
        }
    };
    let Some((_, keys)) = sections.get_mut(at) else {
        return;
    };
    match keys.iter_mut().find(|(k, _)| k == key) {
        Some(entry) => entry.1 = value,
        None => keys.push((key.to_owned(), value)),
    }
}

/// Numbers, booleans, strings, arrays and tables as they are; a bare word becomes a string.
fn toml_value(value: &str) -> String {
    let literal =
        value.parse::<f64>().is_ok() || ["true", "false"].contains(&value) || value.starts_with(['"', '\'', '[', '{']);
    if literal { value.to_owned() } else { format!("{value:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Lab;

    #[test]
    fn a_line_of_the_user_replaces_the_labs_own() -> Result<()> {
        let mut spec = Lab::builder().spec_for_test();
        spec.conf = vec!["messagetimeout = 5".into(), "NodeSet=a Nodes=n0".into()];
        let text = slurm_conf(&spec)?;
        assert!(text.contains("MessageTimeout=5\n"), "{text}");
        assert_eq!(text.to_lowercase().matches("messagetimeout").count(), 1);
        assert!(text.contains("\nNodeSet=a Nodes=n0\n"));
        Ok(())
    }

    #[test]
    fn pliant_toml_takes_literals_and_bare_words() -> Result<()> {
        let mut spec = Lab::builder().spec_for_test();
        spec.poll_interval = 0.5;
        spec.pliant_set = vec!["elastic.grace=5".into(), "log.level = debug".into()];
        let text = pliant_toml(&spec)?;
        for line in ["poll_interval = 0.5", "grace = 5", "[log]", "level = \"debug\""] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        Ok(())
    }

    #[test]
    fn every_gpu_has_the_cores_of_its_socket_and_links_to_all() {
        let spec = Lab::builder().gpus(8).spec_for_test();
        let text = gres_conf(&spec);
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(lines.len(), 8);
        assert!(lines[0].ends_with("Cores=0-31 Links=-1,2,2,4,1,1,1,1"), "{}", lines[0]);
        assert!(lines[7].ends_with("Cores=32-63 Links=1,1,1,1,4,2,2,-1"), "{}", lines[7]);
    }
}
