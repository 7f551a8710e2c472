//! Man pages and completions, from the same definitions as the help.

use crate::args::Cli;
use crate::output::json;
use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};
use pliant_protocol::{config, exit, options};
use std::io::Write as _;
use std::path::Path;

/// Writes `pliant.1` and a page for each command.
///
/// # Errors
/// When the folder or a file in it cannot be written.
pub fn write(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    for page in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        clap_mangen::generate_to(page.clone(), dir).with_context(|| format!("write into {}", dir.display()))?;
    }
    let path = dir.join("pliant.1");
    std::fs::write(&path, main_page(command)?).with_context(|| format!("write {}", path.display()))
}

/// Prints completions.
///
/// # Errors
/// When standard output cannot be written.
pub fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut text = vec![];
    let whole = Cli::command();
    let shown = whole.get_subcommands().filter(|c| !c.is_hide_set()).cloned();
    let mut command = clap::Command::new("pliant").args(whole.get_arguments().cloned()).subcommands(shown);
    clap_complete::generate(shell, &mut command, "pliant", &mut text);
    Ok(std::io::stdout().write_all(&text)?)
}

fn main_page(command: clap::Command) -> anyhow::Result<Vec<u8>> {
    let man = Man::new(command);
    let mut out = vec![];
    man.render_title(&mut out)?;
    man.render_name_section(&mut out)?;
    man.render_synopsis_section(&mut out)?;
    man.render_description_section(&mut out)?;
    man.render_options_section(&mut out)?;
    man.render_subcommands_section(&mut out)?;
    let mut roff = Roff::new();
    elastic(&mut roff);
    environment(&mut roff);
    roff.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in exit::TABLE {
        entry(&mut roff, &code.to_string(), "", &format!("{meaning}."));
    }
    roff.control("PP", []);
    roff.text([roman(
        "pliant run otherwise ends with the code of the first rank that failed, 128 + signal where a signal ended it.",
    )]);
    roff.control("SH", ["JSON"]);
    roff.text([roman("Keys are only added, never renamed or removed, within a major version. By command:")]);
    for (command, keys) in json::KEYS {
        entry(&mut roff, command, "", &format!("{keys}."));
    }
    roff.control("SH", ["FILES"]);
    let keys = config::known_keys().join(", ");
    entry(&mut roff, config::DEFAULT_PATH, "", &format!("configuration (TOML): {keys}."));
    roff.control("SH", ["SEE ALSO"]);
    roff.text([roman("sbatch(1), srun(1), salloc(1), squeue(1), slurm.conf(5), munge(7)")]);
    roff.to_writer(&mut out)?;
    Ok(out)
}

fn elastic(roff: &mut Roff) {
    roff.control("SH", ["OPTIONS OF ELASTIC JOBS"]);
    roff.text([roman(
        "Options of sbatch, salloc and srun, on the command line or in #SBATCH lines. Of several flags the last one \
         wins; a flag, wherever written, beats the environment variable of the same meaning.",
    )]);
    for def in &options::OPTIONS {
        let help = format!("{}. Grammar: {}. Environment: {}.", def.help, def.grammar, def.env);
        entry(roff, &format!("--{}=", def.name), def.value_name, &help);
    }
}

fn environment(roff: &mut Roff) {
    roff.control("SH", ["ENVIRONMENT"]);
    entry(roff, "PLIANT_CONFIG", "", "Configuration file, as --config.");
    for def in &options::OPTIONS {
        entry(roff, def.env, "", &format!("As --{} of sbatch, salloc and srun.", def.name));
    }
    roff.control("PP", []);
    roff.text([roman("An elastic job finds in its own environment:")]);
    for (name, meaning) in [
        (options::JOB_ELASTIC, "its range of GPUs"),
        (options::JOB_ELASTIC_GRACE, "its grace in seconds"),
        (options::JOB_ELASTIC_LOCALITY, "node or any"),
        (options::JOB_AGENT, "socket of the agent on its node"),
    ] {
        entry(roff, name, "", &format!("{meaning}."));
    }
}

fn entry(roff: &mut Roff, name: &str, value: &str, text: &str) {
    roff.control("TP", []);
    roff.text([bold(name), italic(value)]);
    roff.text([roman(text)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_hold_the_tables_and_no_hidden_command() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path()).unwrap();
        let mut names: Vec<String> =
            dir.path().read_dir().unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        let expected = [
            "config-check",
            "config",
            "doctor",
            "explain",
            "gpus",
            "jobs",
            "run",
            "status",
            "topo-check",
            "topo-export",
            "topo-import",
            "topo-show",
            "topo",
        ];
        let expected: Vec<String> =
            expected.iter().map(|n| format!("pliant-{n}.1")).chain(["pliant.1".into()]).collect();
        assert_eq!(names, expected);
        // roff writes a dash as \-.
        let page = std::fs::read_to_string(dir.path().join("pliant.1")).unwrap().replace("\\-", "-");
        for (code, meaning) in exit::TABLE {
            assert!(page.contains(&format!("\\fB{code}\\fR")) && page.contains(meaning), "{code}");
        }
        for def in &options::OPTIONS {
            assert!(page.contains(&format!("--{}=", def.name)) && page.contains(def.env), "{}", def.name);
        }
        assert!(!page.contains("supervise") && page.contains("daemon.socket"));
    }
}
