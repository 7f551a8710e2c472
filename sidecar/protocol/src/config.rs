//! `/etc/pliant/pliant.toml`: one file for all parts; each reads its own tables.

use pliant_model::Seconds;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Where the file is, unless told otherwise (`--config`, `PLIANT_CONFIG`).
pub const DEFAULT_PATH: &str = "/etc/pliant/pliant.toml";

/// The largest file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// pliantd.
    pub daemon: Daemon,
    /// pliant-agent, and how the parts in a job find it.
    pub agent: Agent,
    /// Slurm and MUNGE.
    pub slurm: Slurm,
    /// The select plugin, and what pliantd and it share.
    pub select: Select,
    /// What users may ask for.
    pub elastic: Elastic,
}

/// `[daemon]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Daemon {
    /// Journal and lock; a local disk.
    pub state_dir: PathBuf,
    /// Socket for `pliant`.
    pub socket: PathBuf,
    /// Address for agents.
    pub listen: String,
    /// The bridge to libslurm that fits the installed Slurm.
    pub bridge: PathBuf,
    /// Seconds between two looks at Slurm.
    pub poll_interval: Seconds,
    /// Seconds after which Slurm's last answer is too old to act on.
    pub stale_after: Seconds,
    /// Seconds that Slurm may take to allocate a slice before it is withdrawn.
    pub patience: Seconds,
    /// The account that pliantd runs as; agents accept no other.
    pub user: String,
}

impl Default for Daemon {
    fn default() -> Self {
        Daemon {
            state_dir: "/var/lib/pliant".into(),
            socket: "/run/pliant/pliantd.sock".into(),
            listen: "0.0.0.0:7467".into(),
            bridge: "/usr/libexec/pliant/pliant-slurm-bridge".into(),
            poll_interval: 10,
            stale_after: 40,
            patience: 5,
            user: "pliant".into(),
        }
    }
}

/// `[agent]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Agent {
    /// Socket for the jobs of the node; `%n` stands for the NodeName.
    pub socket: String,
    /// Address of pliantd.
    pub daemon: String,
    /// NVML's library; a name is looked for as the linker does. Absent: no GPU telemetry, and nothing else is missing.
    pub nvml: PathBuf,
}

impl Default for Agent {
    fn default() -> Self {
        Agent {
            socket: "/run/pliant/agent.sock".into(),
            daemon: "localhost:7467".into(),
            nvml: "libnvidia-ml.so.1".into(),
        }
    }
}

/// `[slurm]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Slurm {
    /// munged's socket; empty: libmunge's own default.
    pub munge_socket: PathBuf,
    /// slurm.conf; empty: Slurm's own default.
    pub conf: PathBuf,
}

/// `[select]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Select {
    /// The plan board that pliantd writes; on a tmpfs.
    pub board: PathBuf,
    /// The event ring that slurmctld writes; on a tmpfs, in a folder of SlurmUser's that pliantd may read.
    pub ring: PathBuf,
    /// Seconds that an elastic job waits for its plan before Slurm places it by itself: 0 to 2.
    pub hold: Seconds,
    /// How many pending jobs, from the head of the queue, get a plan of their own.
    pub depth: usize,
}

impl Default for Select {
    fn default() -> Self {
        Select {
            board: "/run/pliant/plan.board".into(),
            ring: "/run/pliant-select/events.ring".into(),
            hold: 0,
            depth: 200,
        }
    }
}

/// `[elastic]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Elastic {
    /// Seconds of grace where the user names none.
    pub grace: Seconds,
    /// Most seconds of grace that a user may ask for.
    pub grace_max: Seconds,
    /// Seconds after which a first world in which no rank has called `pliant.connect()` is taken for one of a script
    /// without the client. Longer than a script takes to load.
    pub client_wait: Seconds,
    /// How a job may grow.
    pub grow: Grow,
}

impl Default for Elastic {
    fn default() -> Self {
        Elastic { grace: 60, grace_max: 600, client_wait: 60, grow: Grow::Slices }
    }
}

/// How a job may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Grow {
    /// By allocations of their own beside it, in any Slurm.
    Slices,
    /// Also by Slurm's own merge of jobs (`--dependency=expand`), which the select plugin then allows for jobs with GPUs.
    InPlace,
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
    /// Not TOML, or a value of the wrong type; the text has line and column.
    #[error("{path}: {text}")]
    Syntax {
        /// Which file.
        path: PathBuf,
        /// toml's words.
        text: String,
    },
    /// A key that nothing reads.
    #[error("{path}: unknown key \"{key}\"{}", nearest.as_ref().map(|n| format!(", did you mean \"{n}\"?")).unwrap_or_default())]
    UnknownKey {
        /// Which file.
        path: PathBuf,
        /// As typed, with its table.
        key: String,
        /// The nearest known one.
        nearest: Option<String>,
    },
    /// A value that makes no sense.
    #[error("{path}: {key} = {value}: {why}")]
    Value {
        /// Which file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// As typed.
        value: String,
        /// What is wrong with it.
        why: &'static str,
    },
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`ConfigError`], which names the file, what was typed and what to do.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        use std::io::Read as _;
        let read = |source| ConfigError::Read { path: path.to_owned(), source };
        let mut text = String::new();
        std::fs::File::open(path).map_err(read)?.take(MAX_FILE).read_to_string(&mut text).map_err(read)?;
        Config::parse(&text, path)
    }

    /// Reads the file that `PLIANT_CONFIG` names, or the default one; defaults where the default one is not there.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn find(named: Option<&Path>) -> Result<Config, ConfigError> {
        match named {
            Some(path) => Config::load(path),
            None if Path::new(DEFAULT_PATH).exists() => Config::load(Path::new(DEFAULT_PATH)),
            None => Ok(Config::default()),
        }
    }

    /// Checks a text; `path` is for messages.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        let syntax = |e: toml::de::Error| ConfigError::Syntax { path: path.to_owned(), text: e.to_string() };
        let table: toml::Table = text.parse().map_err(syntax)?;
        let known = known_keys();
        for key in leaf_keys(&table) {
            if !known.contains(&key) {
                let distance = |k: &&String| strsim::damerau_levenshtein(k, &key);
                let nearest = known.iter().min_by_key(distance).filter(|k| distance(k) <= key.len() / 2);
                return Err(ConfigError::UnknownKey { path: path.to_owned(), nearest: nearest.cloned(), key });
            }
        }
        let config: Config = toml::from_str(text).map_err(syntax)?;
        config.check(path)?;
        Ok(config)
    }

    fn check(&self, path: &Path) -> Result<(), ConfigError> {
        let bad = |key, value: Seconds, why| {
            Err(ConfigError::Value { path: path.to_owned(), key, value: value.to_string(), why })
        };
        let d = &self.daemon;
        if d.poll_interval == 0 || d.poll_interval > 3600 {
            return bad("daemon.poll_interval", d.poll_interval, "must be 1 to 3600 seconds");
        }
        if d.stale_after <= d.poll_interval {
            return bad("daemon.stale_after", d.stale_after, "must be above daemon.poll_interval");
        }
        if d.patience == 0 {
            return bad("daemon.patience", d.patience, "must be at least 1 second");
        }
        if self.select.hold > 2 {
            return bad("select.hold", self.select.hold, "must be 0 to 2 seconds");
        }
        if self.elastic.grace > self.elastic.grace_max {
            return bad("elastic.grace", self.elastic.grace, "must not be above elastic.grace_max");
        }
        Ok(())
    }
}

/// Every key with its table: `daemon.listen`, ….
pub fn known_keys() -> Vec<String> {
    toml::Table::try_from(Config::default()).map(|t| leaf_keys(&t)).unwrap_or_default()
}

fn leaf_keys(table: &toml::Table) -> Vec<String> {
    let mut out = vec![];
    for (name, value) in table {
        match value {
            toml::Value::Table(inner) if !inner.is_empty() => out.extend(inner.keys().map(|k| format!("{name}.{k}"))),
            toml::Value::Table(_) => {}
            _ => out.push(name.clone()),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("pliant.toml"))
    }

    #[test]
    fn an_empty_file_is_the_defaults() {
        assert_eq!(parse("").unwrap(), Config::default());
        assert!(known_keys().contains(&"elastic.grace_max".to_owned()));
    }

    #[test]
    fn an_unknown_key_names_the_nearest() {
        let e = parse("[daemon]\npol_interval = 3\n").unwrap_err().to_string();
        assert_eq!(e, "pliant.toml: unknown key \"daemon.pol_interval\", did you mean \"daemon.poll_interval\"?");
        assert!(parse("colour = 1").unwrap_err().to_string().contains("unknown key \"colour\""));
    }

    #[test]
    fn values_are_checked() {
        assert!(parse("[daemon]\npoll_interval = 0").unwrap_err().to_string().contains("daemon.poll_interval = 0"));
        assert!(parse("[daemon]\npoll_interval = \"x\"").unwrap_err().to_string().contains("line 2"));
        assert!(parse("[elastic]\ngrace = 700").is_err());
        assert!(
            parse("[select]\nhold = 3").unwrap_err().to_string().contains("select.hold = 3: must be 0 to 2 seconds")
        );
    }
}
