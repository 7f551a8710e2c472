//! Slurm's hostlists: `n[1-3,07],login`, expanded and written back.

use crate::ids::NodeName;

/// The most names one expression may stand for (Slurm's own limit of one range).
pub const MAX_NAMES: usize = 65_536;

/// The longest name, in bytes (host names end at 255; device files fit as well).
pub const MAX_NAME: usize = 255;

/// The most digits of a number.
const MAX_WIDTH: usize = 64;

/// The most brackets of a name.
const MAX_BRACKETS: usize = 16;

/// Why a text is no hostlist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostlistError {
    /// `[` without `]` or the reverse.
    #[error("unbalanced brackets")]
    Unbalanced,
    /// Something that is no number or number range inside brackets.
    #[error("not a number or a range of numbers inside the brackets")]
    Range,
    /// Text after the last bracket of a name.
    #[error("{0}: releases of Slurm before 23.11 refuse text after the last bracket")]
    Suffix(String),
    /// More than [`MAX_NAMES`].
    #[error("more than {MAX_NAMES} names")]
    TooMany,
    /// Longer than [`MAX_NAME`], or with more than 16 brackets.
    #[error("a name of more than {MAX_NAME} bytes, or with more than {MAX_BRACKETS} brackets")]
    TooLong,
}

/// How a release of Slurm reads what follows a bracket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// Up to 23.02: text after the last bracket of a name is refused.
    Old,
    /// 23.11 and later: `node[1-3]-ib` is read.
    New,
}

/// As [`expand`], and refuses what that release refuses.
///
/// # Errors
/// As [`expand`], and [`HostlistError::Suffix`].
pub fn expand_for(text: &str, release: Release) -> Result<Vec<NodeName>, HostlistError> {
    let names = expand(text)?;
    let suffix = |part: &&str| part.contains('[') && !part.ends_with(']');
    match split(text)?.into_iter().find(suffix) {
        Some(part) if release == Release::Old => Err(HostlistError::Suffix(part.chars().take(60).collect())),
        _ => Ok(names),
    }
}

/// Expands an expression, keeping order, duplicates and the width of numbers. Empty text and `(null)` give no names.
pub fn expand(text: &str) -> Result<Vec<NodeName>, HostlistError> {
    let mut out = vec![];
    if matches!(text.trim(), "" | "(null)") {
        return Ok(out);
    }
    for part in split(text)? {
        let mut names = vec![String::new()];
        let (mut rest, mut brackets) = (part, 0);
        // The check comes before the names are made: a long prefix times many numbers would be gigabytes.
        let fits = |names: &[String], more: usize| {
            let longest = names.iter().map(String::len).max().unwrap_or(0);
            if longest + more > MAX_NAME { Err(HostlistError::TooLong) } else { Ok(()) }
        };
        while let Some(open) = rest.find('[') {
            brackets += 1;
            if brackets > MAX_BRACKETS {
                return Err(HostlistError::TooLong);
            }
            let close = rest[open..].find(']').ok_or(HostlistError::Unbalanced)? + open;
            let numbers = numbers(&rest[open + 1..close])?;
            fits(&names, open + numbers.iter().map(String::len).max().unwrap_or(0))?;
            if names.len().saturating_mul(numbers.len()) > MAX_NAMES {
                return Err(HostlistError::TooMany);
            }
            let prefix = &rest[..open];
            names = names.iter().flat_map(|n| numbers.iter().map(move |k| format!("{n}{prefix}{k}"))).collect();
            rest = &rest[close + 1..];
        }
        fits(&names, rest.len())?;
        out.extend(names.into_iter().map(|n| NodeName(n + rest)));
        if out.len() > MAX_NAMES {
            return Err(HostlistError::TooMany);
        }
    }
    Ok(out)
}

/// Splits at the commas outside brackets.
fn split(text: &str) -> Result<Vec<&str>, HostlistError> {
    let (mut parts, mut depth, mut start) = (vec![], 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '[' if depth == 0 => depth = 1,
            ']' if depth == 1 => depth = 0,
            '[' | ']' => return Err(HostlistError::Unbalanced),
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if depth != 0 {
        return Err(HostlistError::Unbalanced);
    }
    parts.push(text[start..].trim());
    parts.retain(|p| !p.is_empty());
    Ok(parts)
}

fn numbers(text: &str) -> Result<Vec<String>, HostlistError> {
    let mut out = vec![];
    for part in text.split(',') {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        // Zeros in front may be many, the number itself is one of 64 bits.
        let digits = |s: &str| {
            let fits = !s.is_empty() && s.len() <= MAX_WIDTH && s.bytes().all(|b| b.is_ascii_digit());
            let number = s.trim_start_matches('0');
            fits.then(|| if number.is_empty() { Some(0) } else { number.parse::<usize>().ok() }).flatten()
        };
        let (Some(lo), Some(hi)) = (digits(a), digits(b)) else {
            return Err(HostlistError::Range);
        };
        if hi < lo {
            return Err(HostlistError::Range);
        }
        if hi - lo >= MAX_NAMES || out.len() + (hi - lo) >= MAX_NAMES {
            return Err(HostlistError::TooMany);
        }
        out.extend((lo..=hi).map(|n| format!("{n:0width$}", width = a.len())));
    }
    Ok(out)
}

/// Writes names back as an expression that [`expand`] and Slurm read; order is kept, runs of numbers are joined.
pub fn compress<'a>(names: impl IntoIterator<Item = &'a NodeName>) -> String {
    // First, last, width.
    type Run = Option<(u64, u64, usize)>;
    let mut runs: Vec<(String, Run)> = vec![];
    for NodeName(name) in names {
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count().min(18);
        let (prefix, number) = name.split_at(name.len() - digits);
        let value = number.parse::<u64>().ok();
        match (runs.last_mut(), value) {
            (Some((p, Some((_, last, width)))), Some(v)) if *p == prefix && *width == digits && *last + 1 == v => {
                *last = v;
            }
            _ => runs.push((prefix.to_owned(), value.map(|v| (v, v, digits)))),
        }
    }
    let show = |(a, b, w): (u64, u64, usize)| {
        if a == b { format!("{a:0w$}") } else { format!("{a:0w$}-{b:0w$}") }
    };
    let mut out: Vec<String> = vec![];
    let mut runs = runs.into_iter().peekable();
    while let Some((prefix, run)) = runs.next() {
        let Some(first) = run else {
            out.push(prefix);
            continue;
        };
        let mut parts = vec![show(first)];
        while let Some((_, Some(next))) = runs.next_if(|(p, r)| *p == prefix && r.is_some()) {
            parts.push(show(next));
        }
        let single = parts.len() == 1 && first.0 == first.1;
        out.push(if single { format!("{prefix}{}", parts.join("")) } else { format!("{prefix}[{}]", parts.join(",")) });
    }
    out.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(text: &str) -> Vec<String> {
        expand(text).unwrap().into_iter().map(|n| n.0).collect()
    }

    #[test]
    fn forms() {
        assert_eq!(names("n[1-3,07],login"), ["n1", "n2", "n3", "n07", "login"]);
        assert_eq!(names("a[0-1]b[8-9]"), ["a0b8", "a0b9", "a1b8", "a1b9"]);
        assert_eq!(names("n[1,01,001]").len(), 3);
        assert_eq!(names("(null)").len(), 0);
        assert_eq!(names("node[01-02]-ib"), ["node01-ib", "node02-ib"]);
    }

    #[test]
    fn damage_and_size_are_refused() {
        assert_eq!(expand("n[1-3"), Err(HostlistError::Unbalanced));
        assert_eq!(expand("n1]"), Err(HostlistError::Unbalanced));
        assert_eq!(expand("n[a]"), Err(HostlistError::Range));
        assert_eq!(expand("n[1-999999999]"), Err(HostlistError::TooMany));
        assert_eq!(expand("n[0-65535]").map(|n| n.len()), Ok(65_536));
        assert_eq!(expand("n[1-300][1-300]"), Err(HostlistError::TooMany));
        assert_eq!(expand(&format!("{}[0-65535]", "n".repeat(255))), Err(HostlistError::TooLong));
        assert_eq!(expand(&"n[0]".repeat(17)), Err(HostlistError::TooLong));
    }

    #[test]
    fn compress_joins_runs() {
        assert_eq!(compress(&expand("n1,n2,n3,n5,login,n07").unwrap()), "n[1-3,5],login,n07");
        assert_eq!(compress(&expand("n1").unwrap()), "n1");
    }

    proptest! {
        #[test]
        fn what_is_compressed_expands_back(list in proptest::collection::vec("[a-c]{1,2}[0-9]{0,3}", 1..12)) {
            let list: Vec<NodeName> = list.into_iter().map(NodeName).collect();
            prop_assert_eq!(expand(&compress(&list)).unwrap(), list);
        }

        #[test]
        fn a_release_refuses_only_more(text in "[n0-9,\\[\\]-]{0,24}") {
            if let Ok(names) = expand_for(&text, Release::Old) {
                prop_assert_eq!(expand(&text), Ok(names));
            }
        }

        #[test]
        fn no_text_panics(text in "[n0-9,\\[\\]-]{0,24}") {
            let _ = expand(&text);
        }
    }
}
