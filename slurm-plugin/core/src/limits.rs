// SPDX-License-Identifier: GPL-2.0-or-later
//! Default and maximum of the grace, from pliant.toml. A file that cannot be used gives the built-in ones and one line.

use crate::args::PluginArgs;
use pliant_protocol::config::{Config, ConfigError};
use pliant_protocol::options::GraceLimits;
use std::io;

/// Reads the limits, and what to log where the file cannot be used.
pub fn read(args: &PluginArgs) -> (GraceLimits, Option<String>) {
    match Config::load(&args.config) {
        Ok(config) => (GraceLimits { default: config.elastic.grace, max: config.elastic.grace_max }, None),
        Err(ConfigError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound && !args.config_named => {
            (GraceLimits::default(), None)
        }
        Err(error) => {
            let first = error.to_string().lines().next().unwrap_or_default().to_owned();
            (GraceLimits::default(), Some(format!("{first} (built-in limits of --elastic-grace are used)")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> (GraceLimits, Option<String>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pliant.toml");
        std::fs::write(&path, text).unwrap();
        read(&PluginArgs::parse(&[format!("config={}", path.display())]))
    }

    #[test]
    fn the_file_counts_where_it_can_be_read() {
        let (limits, line) = read_text("[elastic]\ngrace = 5\ngrace_max = 7\n");
        assert_eq!((limits, line), (GraceLimits { default: 5, max: 7 }, None));
    }

    #[test]
    fn a_broken_or_missing_file_is_one_line_and_the_defaults() {
        for text in ["[elastic\n", "[elastic]\ngarce = 5\n", "\0\u{fffd}"] {
            let (limits, line) = read_text(text);
            assert_eq!(limits, GraceLimits::default());
            assert_eq!(line.unwrap().lines().count(), 1);
        }
        let missing = PluginArgs::parse(&["config=/nowhere/pliant.toml"]);
        assert!(read(&missing).1.unwrap().contains("/nowhere/pliant.toml"));
        let unnamed = PluginArgs { config: "/nowhere/pliant.toml".into(), ..PluginArgs::default() };
        assert_eq!(read(&unnamed), (GraceLimits::default(), None));
    }
}
