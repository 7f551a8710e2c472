//! The SPANK plugin on this host: its line in plugstack.conf, its file, and whether Slurm's commands have taken it.

use super::{Host, fail, ok, warn};
use pliant_protocol::admin::Finding;
use pliant_protocol::options::OPTIONS;
use std::path::{Path, PathBuf};

const FILE: &str = "spank_pliant.so";
/// Where Slurm looks if slurm.conf has no PlugStackConfig and lies nowhere.
const DEFAULT: &str = "/etc/slurm/plugstack.conf";
const LINE: &str = "add: optional /usr/lib/.../spank_pliant.so (docs/admin)";

/// A line of plugstack.conf.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    /// plugstack.conf itself or a file that it includes.
    file: PathBuf,
    required: bool,
    plugin: String,
    arguments: Vec<String>,
}

/// plugstack.conf, the file, the option.
pub fn check(host: &Host) -> Vec<Finding> {
    let conf = host
        .slurm
        .get("PlugStackConfig")
        .map(PathBuf::from)
        .or_else(|| host.slurm.beside("plugstack.conf"))
        .unwrap_or_else(|| DEFAULT.into());
    let mut lines = vec![];
    if let Err(e) = read(&conf, 0, &mut lines) {
        return vec![fail("plugstack.conf", format!("{}: {e}", conf.display()), LINE)];
    }
    lines.retain(|l| l.plugin.rsplit('/').next() == Some(FILE));
    let mut all = vec![entry(&conf, &lines)];
    if let Some(line) = lines.first() {
        all.push(file(line, host.slurm.get("PluginDir")));
        all.extend(arguments(line, &host.config.agent.socket));
    }
    all.push(option(host));
    all
}

/// Reads a plugstack.conf with what it includes, at most 8 deep.
fn read(path: &Path, depth: u8, lines: &mut Vec<Line>) -> std::io::Result<()> {
    for line in std::fs::read_to_string(path)?.lines() {
        let mut words = line.split('#').next().unwrap_or_default().split_ascii_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        match first {
            "optional" | "required" => lines.push(Line {
                file: path.to_owned(),
                required: first == "required",
                plugin: second.to_owned(),
                arguments: words.map(str::to_owned).collect(),
            }),
            "include" if depth < 8 => {
                for file in expand(&path.with_file_name(second)) {
                    // Slurm, too, goes on without a file that it cannot read.
                    let _ = read(&file, depth + 1, lines);
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// The files that a pattern with `*` and `?` in its last part names, sorted.
fn expand(pattern: &Path) -> Vec<PathBuf> {
    let (Some(dir), Some(name)) = (pattern.parent(), pattern.file_name().and_then(|n| n.to_str())) else {
        return vec![];
    };
    let fits =
        |file: &Path| file.file_name().and_then(|n| n.to_str()).is_some_and(|n| matches(name.as_bytes(), n.as_bytes()));
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().filter_map(|f| Some(f.ok()?.path())).filter(|p| fits(p)).collect();
    files.sort();
    files
}

fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) if matches(rest, name) => true,
        (Some((b'*', _)), Some((_, left))) => matches(pattern, left),
        (Some((b'?', rest)), Some((_, left))) => matches(rest, left),
        (Some((p, rest)), Some((n, left))) => p == n && matches(rest, left),
        _ => false,
    }
}

fn entry(conf: &Path, lines: &[Line]) -> Finding {
    let name = "plugstack.conf";
    match lines {
        [] => fail(name, format!("{} has no line for {FILE}", conf.display()), LINE),
        lines if lines.iter().any(|l| l.required) => fail(
            name,
            format!("{} loads {FILE} as required", conf.display()),
            "write optional: with required, a host without the plugin refuses every submission",
        ),
        [line] => ok(name, format!("optional {} in {}", line.plugin, line.file.display())),
        lines => warn(name, format!("{} lines load {FILE}", lines.len()), "keep one of them"),
    }
}

fn file(line: &Line, plugin_dir: Option<&str>) -> Finding {
    let name = "plugin file";
    let path = Path::new(&line.plugin);
    let places: Vec<PathBuf> = if path.is_absolute() {
        vec![path.to_owned()]
    } else {
        plugin_dir.unwrap_or_default().split(':').filter(|d| !d.is_empty()).map(|d| Path::new(d).join(path)).collect()
    };
    match places.iter().find(|p| p.is_file()) {
        Some(found) => match std::fs::File::open(found) {
            Ok(_) => ok(name, found.display().to_string()),
            Err(e) => fail(name, format!("{}: {e}", found.display()), "make it readable for everybody (mode 0644)"),
        },
        None => fail(
            name,
            format!("{} is not there", line.plugin),
            "install Pliant's plugin package of this Slurm release, on every login and GPU node",
        ),
    }
}

/// Jobs find the agent at the place that the plugin names, the launcher at that of pliant.toml.
fn arguments(line: &Line, socket: &str) -> Option<Finding> {
    let named = line.arguments.iter().rev().find_map(|a| a.strip_prefix("agent_socket="));
    let said = named.unwrap_or("/run/pliant/agent.sock");
    (said != socket).then(|| {
        warn(
            "plugin arguments",
            format!("agent_socket={said} in {}, agent.socket=\"{socket}\" in pliant.toml", line.file.display()),
            "let both name the same socket",
        )
    })
}

fn option(host: &Host) -> Finding {
    let name = "sbatch --elastic";
    let mut help = host.slurm_command("sbatch", &["--help"]);
    match crate::command::run(&mut help, b"", super::LIMIT) {
        Ok(done) if done.status.success() => judge(&done.text(), &done.stderr),
        Ok(done) => fail(name, format!("sbatch --help: {}", done.complaint()), "see whether sbatch works at all"),
        Err(e) => fail(name, e.to_string(), "install Slurm's client commands (Debian: slurm-client)"),
    }
}

/// By what `sbatch --help` says.
fn judge(help: &str, complaints: &str) -> Finding {
    let name = "sbatch --elastic";
    let missing: Vec<String> = OPTIONS
        .iter()
        .filter(|def| !help.contains(&format!("--{}=", def.name)))
        .map(|def| format!("--{}", def.name))
        .collect();
    let plugin =
        |l: &&str| l.contains("pliant") || l.to_lowercase().contains("spank") || l.to_lowercase().contains("plugin");
    match (missing.as_slice(), complaints.lines().find(plugin)) {
        ([], None) => ok(name, "in the help of sbatch, with all its neighbours"),
        ([], Some(line)) => warn(name, line.trim(), "see docs/admin"),
        (missing, line) if missing.len() == OPTIONS.len() => fail(
            name,
            line.map_or_else(|| "sbatch does not know it".to_owned(), |l| l.trim().to_owned()),
            "the plugin must be built for this Slurm's major.minor release; jobs run as plain ones meanwhile",
        ),
        (missing, _) => warn(
            name,
            format!("sbatch does not know {}", missing.join(", ")),
            "the plugin is older than this pliant: install the same version",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pliant_protocol::admin::Level;

    fn lines(main: &str, included: &str) -> Vec<Line> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("plugstack.conf.d")).unwrap();
        std::fs::write(dir.path().join("plugstack.conf.d/pliant.conf"), included).unwrap();
        std::fs::write(dir.path().join("plugstack.conf.d/other.txt"), "required not_read.so").unwrap();
        let conf = dir.path().join("plugstack.conf");
        std::fs::write(&conf, main).unwrap();
        let mut lines = vec![];
        read(&conf, 0, &mut lines).unwrap();
        lines
    }

    #[test]
    fn lines_are_read_through_includes() {
        let read = lines(
            "# optional no.so\ninclude plugstack.conf.d/*.conf\nrequired a.so x=1\n",
            "optional /p/spank_pliant.so agent_socket=/s config=/c # why\n",
        );
        let plugins: Vec<(&str, bool)> = read.iter().map(|l| (l.plugin.as_str(), l.required)).collect();
        assert_eq!(plugins, [("/p/spank_pliant.so", false), ("a.so", true)]);
        assert_eq!(read[0].arguments, ["agent_socket=/s", "config=/c"]);
        assert_eq!(arguments(&read[0], "/s"), None);
        assert_eq!(arguments(&read[0], "/other").unwrap().level, Level::Warn);
    }

    #[test]
    fn the_line_has_to_be_there_once_and_optional() {
        let level = |text| entry(Path::new("plugstack.conf"), &lines(text, "")).level;
        assert_eq!(level(""), Level::Fail);
        assert_eq!(level("required spank_pliant.so"), Level::Fail);
        assert_eq!(level("optional spank_pliant.so"), Level::Ok);
        assert_eq!(level("optional spank_pliant.so\noptional spank_pliant.so"), Level::Warn);
    }

    #[test]
    fn a_plugin_is_searched_in_all_of_plugin_dir() {
        let dir = tempfile::tempdir().unwrap();
        let line = &lines("optional spank_pliant.so", "")[0];
        let dirs = format!("/nonexistent:{}", dir.path().display());
        assert_eq!(file(line, Some(&dirs)).level, Level::Fail);
        std::fs::write(dir.path().join(FILE), "").unwrap();
        assert_eq!(file(line, Some(&dirs)).level, Level::Ok);
    }

    #[test]
    fn patterns() {
        for (pattern, name, fits) in [
            ("*.conf", "a.conf", true),
            ("*.conf", "a.conf.bak", false),
            ("a?", "ab", true),
            ("a", "ab", false),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), fits, "{pattern} {name}");
        }
    }

    #[test]
    fn the_help_of_sbatch_tells() {
        let all: String = OPTIONS.iter().map(|d| format!("  --{}={}\n", d.name, d.value_name)).collect();
        assert_eq!(judge(&all, "").level, Level::Ok);
        assert_eq!(judge("--elastic=X", "").level, Level::Warn);
        let refused = judge("", "sbatch: error: spank: Incompatible Slurm plugin version\n");
        assert_eq!((refused.level, refused.found.contains("Incompatible")), (Level::Fail, true));
    }
}
