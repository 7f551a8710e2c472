// SPDX-License-Identifier: GPL-2.0-or-later
//! `optional spank_pliant.so agent_socket=/run/pliant/agent.sock config=/etc/pliant/pliant.toml`

use pliant_protocol::config::DEFAULT_PATH;
use std::path::PathBuf;

/// Socket of the agent where plugstack.conf names none.
const DEFAULT_AGENT_SOCKET: &str = "/run/pliant/agent.sock";

/// The `key=value` words of a plugstack.conf line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginArgs {
    /// Path of the agent's socket; `%n` stands for the NodeName.
    pub agent_socket: String,
    /// Path of pliant.toml, and whether plugstack.conf names it.
    pub config: PathBuf,
    /// Whether `config` was named: a named file that is missing deserves a line.
    pub config_named: bool,
    /// Words that were not understood, for one line in the log.
    pub unknown: Vec<String>,
}

impl Default for PluginArgs {
    fn default() -> Self {
        PluginArgs {
            agent_socket: DEFAULT_AGENT_SOCKET.to_owned(),
            config: DEFAULT_PATH.into(),
            config_named: false,
            unknown: vec![],
        }
    }
}

impl PluginArgs {
    /// Reads the words; the last of a kind wins, and nothing is fatal.
    pub fn parse<S: AsRef<str>>(words: &[S]) -> PluginArgs {
        let mut args = PluginArgs::default();
        for word in words.iter().map(AsRef::as_ref) {
            match word.split_once('=') {
                Some(("agent_socket", path)) if path.starts_with('/') => args.agent_socket = path.to_owned(),
                Some(("config", path)) if path.starts_with('/') => {
                    args.config = path.into();
                    args.config_named = true;
                }
                _ => args.unknown.push(word.to_owned()),
            }
        }
        args
    }

    /// The agent's socket on `node`.
    pub fn agent_socket_on(&self, node: &str) -> String {
        self.agent_socket.replace("%n", node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_words_are_the_defaults() {
        let args = PluginArgs::parse::<&str>(&[]);
        assert_eq!(args, PluginArgs::default());
        assert_eq!(args.agent_socket_on("n1"), "/run/pliant/agent.sock");
    }

    #[test]
    fn known_words_are_read_and_others_kept_for_the_log() {
        let args =
            PluginArgs::parse(&["agent_socket=/lab/%n/a.sock", "config=/lab/p.toml", "config=rel", "colour=red", "x"]);
        assert_eq!(args.agent_socket_on("n7"), "/lab/n7/a.sock");
        assert_eq!((args.config.to_str(), args.config_named), (Some("/lab/p.toml"), true));
        assert_eq!(args.unknown, ["config=rel", "colour=red", "x"]);
    }
}
