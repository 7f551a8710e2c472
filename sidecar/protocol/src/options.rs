//! The options of elastic jobs: one table that feeds the SPANK plugin, `pliant run`'s own flags, the man pages and the
//! completions, and the one parser behind all of them.
//!
//! An option is *typed* (a text with the place where it was written), then *meant* ([`Request`]). A flag, wherever it
//! was written, beats its environment twin; of several flags the last wins. What a job sees of it is named
//! `PLIANT_JOB_*` ([`JOB_ELASTIC`] and its neighbours), so that inputs and outputs never meet.

use pliant_model::ids::Seconds;
use pliant_model::range::RangeError;
use pliant_model::time::{self, TimeError};
use pliant_model::{GpuRange, Locality};
use serde::{Deserialize, Serialize};
use std::fmt;

/// One option: everything that help, man page, completion and SPANK need to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionDef {
    /// Which one.
    pub key: Key,
    /// Long name without dashes, as in `#SBATCH --elastic=...`.
    pub name: &'static str,
    /// What stands for the value in help texts.
    pub value_name: &'static str,
    /// The environment variable that gives the value where no flag does.
    pub env: &'static str,
    /// The grammar of the value, for error messages.
    pub grammar: &'static str,
    /// Help without the `[pliant]` mark.
    pub help: &'static str,
    /// Help as SPANK shows it.
    pub marked_help: &'static str,
}

/// Names an option of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// `--elastic`.
    Elastic,
    /// `--elastic-grace`.
    Grace,
    /// `--elastic-locality`.
    Locality,
}

macro_rules! option {
    ($key:expr, $name:literal, $value:literal, $env:literal, $grammar:expr, $help:literal) => {
        OptionDef {
            key: $key,
            name: $name,
            value_name: $value,
            env: $env,
            grammar: $grammar,
            help: $help,
            marked_help: concat!("[pliant] ", $help),
        }
    };
}

/// All options, in the order of the help text.
pub static OPTIONS: [OptionDef; 3] = [
    option!(
        Key::Elastic,
        "elastic",
        "[MIN-]MAX[:STEP]",
        "PLIANT_ELASTIC",
        pliant_model::range::GRAMMAR,
        "lend this job idle GPUs, up to MAX over the whole job, in steps of STEP; MIN, if given, is what the \
         native flags ask for (0: start without GPUs and wait for some)"
    ),
    option!(
        Key::Grace,
        "elastic-grace",
        "TIME",
        "PLIANT_ELASTIC_GRACE",
        time::GRAMMAR,
        "time to leave lent GPUs after a notice, such as 1 (minute) or 0:30"
    ),
    option!(
        Key::Locality,
        "elastic-locality",
        "node|any",
        "PLIANT_ELASTIC_LOCALITY",
        "node|any",
        "where lent GPUs may be: on the job's own nodes only, or on any"
    ),
];

/// In the job's environment: the range, as `GpuRange` shows it. Absent: the job is not elastic.
pub const JOB_ELASTIC: &str = "PLIANT_JOB_ELASTIC";
/// In the job's environment: the grace in seconds.
pub const JOB_ELASTIC_GRACE: &str = "PLIANT_JOB_ELASTIC_GRACE";
/// In the job's environment: `node` or `any`.
pub const JOB_ELASTIC_LOCALITY: &str = "PLIANT_JOB_ELASTIC_LOCALITY";
/// In the job's environment: path of the agent's socket on this node.
pub const JOB_AGENT: &str = "PLIANT_JOB_AGENT";
/// What every output to a job begins with.
pub const JOB_PREFIX: &str = "PLIANT_JOB_";

/// Longest part of a typed text that an error message repeats, in characters.
const SHOWN_CHARS: usize = 64;

impl Key {
    /// The entry of the table.
    pub fn def(self) -> &'static OptionDef {
        let [elastic, grace, locality] = &OPTIONS;
        match self {
            Key::Elastic => elastic,
            Key::Grace => grace,
            Key::Locality => locality,
        }
    }
}

/// Where a value was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// On the command line or in an `#SBATCH` line.
    Flag,
    /// In the environment twin.
    Env,
}

/// What was typed for each option: the last flag if there is one, else the twin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Typed {
    elastic: Slot,
    grace: Slot,
    locality: Slot,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Slot {
    flag: Option<String>,
    env: Option<String>,
}

impl Typed {
    fn slot(&self, key: Key) -> &Slot {
        match key {
            Key::Elastic => &self.elastic,
            Key::Grace => &self.grace,
            Key::Locality => &self.locality,
        }
    }

    fn slot_mut(&mut self, key: Key) -> &mut Slot {
        match key {
            Key::Elastic => &mut self.elastic,
            Key::Grace => &mut self.grace,
            Key::Locality => &mut self.locality,
        }
    }

    /// Notes a flag. The last one wins; the same one may come twice.
    pub fn set_flag(&mut self, key: Key, text: &str) {
        self.slot_mut(key).flag = Some(bounded(text));
    }

    /// Notes an environment twin; an empty one is none.
    pub fn set_env(&mut self, key: Key, text: &str) {
        self.slot_mut(key).env = (!text.is_empty()).then(|| bounded(text));
    }

    /// The text that counts, and where it was written.
    pub fn get(&self, key: Key) -> Option<(&str, Source)> {
        let slot = self.slot(key);
        let flag = slot.flag.as_deref().map(|text| (text, Source::Flag));
        flag.or(slot.env.as_deref().map(|text| (text, Source::Env)))
    }

    /// Checks every text that counts.
    ///
    /// `None`: no `--elastic`, so the job is a plain one (texts of the other flags are checked all the same; their twins
    /// are not, since a twin may stand in a profile for jobs to come).
    pub fn meaning(&self, limits: &GraceLimits) -> Result<Option<Request>, OptionError> {
        let range = self.parsed(Key::Elastic, |text| text.parse::<GpuRange>().map_err(Cause::Range))?;
        let elastic = range.is_some();
        let counts = |key| elastic || matches!(self.get(key), Some((_, Source::Flag)));
        let grace = if counts(Key::Grace) { self.parsed(Key::Grace, |text| grace(text, limits))? } else { None };
        let locality = if counts(Key::Locality) {
            self.parsed(Key::Locality, |text| text.parse::<Locality>().map_err(|_| Cause::Locality))?
        } else {
            None
        };
        Ok(range.map(|range| Request {
            range,
            grace: grace.unwrap_or(limits.default.min(limits.max)),
            locality: locality.unwrap_or_default(),
        }))
    }

    /// A flag that has no effect because there is no `--elastic`.
    pub fn without_effect(&self) -> Option<&'static OptionDef> {
        if self.get(Key::Elastic).is_some() {
            return None;
        }
        [Key::Grace, Key::Locality].into_iter().find(|&key| self.slot(key).flag.is_some()).map(Key::def)
    }

    fn parsed<T>(&self, key: Key, parse: impl Fn(&str) -> Result<T, Cause>) -> Result<Option<T>, OptionError> {
        let Some((text, written)) = self.get(key) else {
            return Ok(None);
        };
        parse(text).map(Some).map_err(|cause| OptionError { key, written, text: shown(text), cause })
    }
}

/// Default and maximum of `--elastic-grace`, from pliant.toml.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraceLimits {
    /// Used where none is asked for.
    pub default: Seconds,
    /// Most that may be asked for.
    pub max: Seconds,
}

impl Default for GraceLimits {
    fn default() -> Self {
        GraceLimits { default: 60, max: 600 }
    }
}

/// What an elastic job asks for: a request, never an authorisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// GPUs over the whole job.
    pub range: GpuRange,
    /// Time between a notice and the end of a slice.
    pub grace: Seconds,
    /// Where slices may be.
    pub locality: Locality,
}

impl Request {
    /// Names and values of what the job sees of it (without the agent's socket, which differs by node).
    pub fn job_env(&self) -> [(&'static str, String); 3] {
        [
            (JOB_ELASTIC, self.range.to_string()),
            (JOB_ELASTIC_GRACE, self.grace.to_string()),
            (JOB_ELASTIC_LOCALITY, self.locality.to_string()),
        ]
    }

    /// Reads back what [`Request::job_env`] wrote; `None` where there is no valid range. A grace or locality that is
    /// missing or no longer makes sense falls back to its default: the text came through the user's environment.
    pub fn from_job_env(get: impl Fn(&str) -> Option<String>) -> Option<Request> {
        let range = get(JOB_ELASTIC)?.parse().ok()?;
        let grace = get(JOB_ELASTIC_GRACE).and_then(|text| text.parse().ok()).unwrap_or(GraceLimits::default().default);
        let locality = get(JOB_ELASTIC_LOCALITY).and_then(|text| text.parse().ok()).unwrap_or_default();
        Some(Request { range, grace, locality })
    }
}

fn grace(text: &str, limits: &GraceLimits) -> Result<Seconds, Cause> {
    match time::parse(text).map_err(Cause::Time)? {
        Some(seconds) if seconds <= limits.max => Ok(seconds),
        _ => Err(Cause::GraceTooLong { max: limits.max }),
    }
}

/// A value that is refused. Its text is one line and names what was typed, why not, and what to write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct OptionError {
    /// The option.
    pub key: Key,
    /// Where the text was written.
    written: Source,
    /// What was typed, shortened and escaped.
    text: String,
    cause: Cause,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Cause {
    Range(RangeError),
    Time(TimeError),
    GraceTooLong { max: Seconds },
    Locality,
}

impl fmt::Display for OptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let def = self.key.def();
        match self.written {
            Source::Flag => write!(f, "--{}={}: ", def.name, self.text)?,
            Source::Env => write!(f, "{}={}: ", def.env, self.text)?,
        }
        match &self.cause {
            Cause::Range(RangeError::Grammar) => f.write_str("not a range of GPUs")?,
            Cause::Range(cause) => cause.fmt(f)?,
            Cause::Time(TimeError::Grammar) => f.write_str("not a time")?,
            Cause::Time(cause) => cause.fmt(f)?,
            Cause::GraceTooLong { max } => write!(f, "this cluster allows at most {}", time::format(*max))?,
            Cause::Locality => f.write_str("not a locality")?,
        }
        match self.written {
            Source::Flag => write!(f, "; write --{}={}", def.name, def.value_name)?,
            Source::Env => write!(f, "; write {}={} or unset it", def.env, def.value_name)?,
        }
        if self.key == Key::Grace {
            write!(f, ", TIME as {}", def.grammar)?;
        }
        Ok(())
    }
}

/// A text as an error message repeats it: control characters and backslashes escaped, shortened, never a second line.
pub fn shown(text: &str) -> String {
    let escape = |c: char| -> String {
        if c.is_control() || c == '\\' || !(c.is_ascii() || c.is_alphanumeric()) {
            c.escape_default().to_string()
        } else {
            c.to_string()
        }
    };
    let mut out: String = text.chars().take(SHOWN_CHARS).map(escape).collect();
    if text.chars().nth(SHOWN_CHARS).is_some() {
        out.push_str("...");
    }
    out
}

/// No valid value is longer than this; of a longer text enough is kept to refuse it and to show its beginning.
fn bounded(text: &str) -> String {
    const KEPT: usize = 1024;
    text.chars().take(KEPT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(elastic: &str) -> Typed {
        let mut typed = Typed::default();
        typed.set_flag(Key::Elastic, elastic);
        typed
    }

    fn refused(typed: &Typed) -> String {
        typed.meaning(&GraceLimits::default()).unwrap_err().to_string()
    }

    #[test]
    fn a_flag_beats_its_twin_and_the_last_flag_wins() {
        let mut typed = flags("4");
        typed.set_env(Key::Elastic, "bad, and not looked at");
        typed.set_flag(Key::Elastic, "2-8:2");
        typed.set_env(Key::Grace, "0:30");
        let request = typed.meaning(&GraceLimits::default()).unwrap().unwrap();
        assert_eq!((request.range.to_string().as_str(), request.grace), ("2-8:2", 30));
        assert_eq!(request.locality, Locality::Any);
    }

    #[test]
    fn twins_alone_serve_and_an_empty_twin_is_none() {
        let mut typed = Typed::default();
        typed.set_env(Key::Elastic, "0-16");
        typed.set_env(Key::Locality, "");
        let request = typed.meaning(&GraceLimits { default: 20, max: 30 }).unwrap().unwrap();
        assert_eq!((request.range.min, request.range.max, request.grace), (Some(0), 16, 20));
    }

    #[test]
    fn no_elastic_no_job_and_stray_twins_are_left_alone() {
        let mut typed = Typed::default();
        typed.set_env(Key::Grace, "nonsense");
        assert_eq!(typed.meaning(&GraceLimits::default()), Ok(None));
        typed.set_flag(Key::Grace, "1");
        assert_eq!(typed.meaning(&GraceLimits::default()), Ok(None));
        assert_eq!(typed.without_effect().unwrap().name, "elastic-grace");
        typed.set_flag(Key::Grace, "nonsense");
        assert!(refused(&typed).starts_with("--elastic-grace=nonsense: not a time; write --elastic-grace=TIME"));
    }

    #[test]
    fn every_refusal_is_one_short_line_with_flag_text_and_grammar() {
        let long = "9".repeat(1 << 20);
        for bad in ["16-4", "0", "-1", "4294967296", "4-16:0", "8\n", "", "\u{1b}[2J", &long] {
            let line = refused(&flags(bad));
            assert!(line.starts_with("--elastic="), "{line}");
            assert!(line.ends_with("; write --elastic=[MIN-]MAX[:STEP]"), "{line}");
            assert!(!line.contains(char::is_control) && line.len() < 200, "{line}");
        }
        assert_eq!(refused(&flags("16-4")), "--elastic=16-4: MIN 16 is above MAX 4; write --elastic=[MIN-]MAX[:STEP]");
        let mut twin = Typed::default();
        twin.set_env(Key::Elastic, "x");
        assert_eq!(
            refused(&twin),
            "PLIANT_ELASTIC=x: not a range of GPUs; write PLIANT_ELASTIC=[MIN-]MAX[:STEP] or unset it"
        );
    }

    #[test]
    fn grace_has_a_default_and_a_maximum() {
        let limits = GraceLimits { default: 60, max: 600 };
        let mut typed = flags("8");
        assert_eq!(typed.meaning(&limits).unwrap().unwrap().grace, 60);
        typed.set_flag(Key::Grace, "11");
        assert!(refused(&typed).contains("at most 00:10:00"));
        typed.set_flag(Key::Grace, "UNLIMITED");
        assert!(refused(&typed).contains("at most 00:10:00"));
        typed.set_flag(Key::Grace, "10:00");
        assert_eq!(typed.meaning(&limits).unwrap().unwrap().grace, 600);
    }

    #[test]
    fn what_the_job_sees_reads_back() {
        let mut typed = flags("2-8:2");
        typed.set_flag(Key::Locality, "node");
        let request = typed.meaning(&GraceLimits::default()).unwrap().unwrap();
        let env = request.job_env();
        let get = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| v.clone());
        assert_eq!(Request::from_job_env(get), Some(request));
        assert_eq!(Request::from_job_env(|name| (name == JOB_ELASTIC).then(|| "8;rm".to_owned())), None);
    }

    #[test]
    fn the_table_is_consistent() {
        for def in &OPTIONS {
            assert_eq!(def.key.def(), def);
            assert_eq!(def.env, format!("PLIANT_{}", def.name.to_uppercase().replace('-', "_")));
            assert_eq!(def.marked_help, format!("[pliant] {}", def.help));
        }
    }
}
