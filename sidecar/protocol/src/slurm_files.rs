//! Slurm's own configuration files on this host, read and parsed: slurm.conf, gres.conf and the topology.

use pliant_model::NodeName;
use pliant_model::conf::gres_conf::{self, GresConf, Layout};
use pliant_model::conf::slurm_conf::{self, SlurmConf};
use pliant_model::conf::{topology_conf, topology_yaml};
use pliant_model::topology::Switches;
use std::path::{Path, PathBuf};

/// The largest file that is read, in bytes.
pub const MAX_FILE: u64 = 64 << 20;

/// What was found, or why not.
#[derive(Debug)]
pub struct SlurmFiles {
    /// Their folder.
    pub folder: PathBuf,
    /// slurm.conf.
    pub slurm: Result<SlurmConf, String>,
    /// gres.conf; `Ok(None)`: there is none.
    pub gres: Result<Option<GresConf>, String>,
    /// topology.yaml or topology.conf; `Ok(None)`: neither.
    pub switches: Result<Option<Switches>, String>,
}

/// The folder of Slurm's configuration: that of the slurm.conf that is set, of `SLURM_CONF`, or the usual one.
pub fn folder(conf: &Path) -> PathBuf {
    let set = Some(conf.to_owned()).filter(|c| !c.as_os_str().is_empty());
    let file = set.or_else(|| std::env::var_os("SLURM_CONF").map(PathBuf::from));
    let file = file.unwrap_or_else(|| "/etc/slurm/slurm.conf".into());
    file.parent().map_or_else(|| "/etc/slurm".into(), Path::to_owned)
}

/// Reads a file of at most [`MAX_FILE`] bytes.
///
/// # Errors
/// Why not, one phrase without the path.
pub fn read(path: &Path) -> Result<String, String> {
    read_from(std::fs::File::open(path).map_err(|e| e.to_string())?)
}

/// Reads at most [`MAX_FILE`] bytes.
///
/// # Errors
/// Why not, one phrase.
pub fn read_from(source: impl std::io::Read) -> Result<String, String> {
    use std::io::Read as _;
    let mut bytes = vec![];
    source.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > MAX_FILE {
        return Err(format!("larger than {} MiB", MAX_FILE >> 20));
    }
    String::from_utf8(bytes).map_err(|_| "no UTF-8 text".to_owned())
}

impl SlurmFiles {
    /// Reads the files of a folder.
    pub fn read(folder: &Path) -> SlurmFiles {
        let mut include = |path: &str| read(&folder.join(path));
        let text = |name: &str| {
            let path = folder.join(name);
            read(&path).map(|t| (path.display().to_string(), t)).map_err(|e| format!("{}: {e}", path.display()))
        };
        let there = |name: &str| folder.join(name).exists();
        let slurm = text("slurm.conf")
            .and_then(|(path, t)| slurm_conf::parse(&path, &t, &mut include).map_err(|e| e.to_string()));
        let gres = match there("gres.conf") {
            false => Ok(None),
            true => text("gres.conf")
                .and_then(|(p, t)| gres_conf::parse(&p, &t, &mut include).map(Some).map_err(|e| e.to_string())),
        };
        let switches = if there("topology.yaml") {
            let default = |(path, t): (String, String)| {
                let all = topology_yaml::parse(&path, &t).map_err(|e| e.to_string())?;
                let first = all.iter().position(|t| t.default).unwrap_or(0);
                Ok(all.into_iter().nth(first).map(|t| t.switches))
            };
            text("topology.yaml").and_then(default)
        } else if there("topology.conf") {
            text("topology.conf")
                .and_then(|(p, t)| topology_conf::parse(&p, &t, &mut include).map(Some).map_err(|e| e.to_string()))
        } else {
            Ok(None)
        };
        SlurmFiles { folder: folder.to_owned(), slurm, gres, switches }
    }

    /// Sockets, cores and threads of a node as slurm.conf says.
    pub fn layout(&self, node: &NodeName) -> Layout {
        let line = self.slurm.as_ref().ok().and_then(|s| s.node_line(node));
        line.map_or(Layout { sockets: 1, cores: 1, threads: 1 }, |l| l.layout())
    }
}
