//! Slurm's time form: `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`,
//! `days-hours:minutes`, `days-hours:minutes:seconds` (man sbatch, `--time`).

use crate::ids::Seconds;

/// The grammar as shown to users.
pub const GRAMMAR: &str = "minutes, minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]]";

/// The longest time: the minutes that Slurm can keep in 32 bits, without its two marks for "none" and "no limit".
pub const MAX: Seconds = 60 * (u32::MAX as Seconds - 2);

/// Why a text is no time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TimeError {
    /// Not of the form.
    #[error("expected {GRAMMAR}")]
    Grammar,
    /// More than [`MAX`].
    #[error("the time is too large: at most {} minutes", MAX / 60)]
    TooLarge,
}

/// Parses a time of Slurm's form into seconds. `UNLIMITED`, `INFINITE` and `-1` give `Ok(None)`.
pub fn parse(text: &str) -> Result<Option<Seconds>, TimeError> {
    if text.eq_ignore_ascii_case("UNLIMITED") || text.eq_ignore_ascii_case("INFINITE") || text == "-1" {
        return Ok(None);
    }
    let (days, rest) = match text.split_once('-') {
        Some((days, rest)) => (Some(number(days)?), rest),
        None => (None, text),
    };
    let parts = rest.split(':').map(number).collect::<Result<Vec<_>, _>>()?;
    // One number is minutes, a:b is min:s, but h:min after a dash.
    let (h, m, s) = match (days, parts.as_slice()) {
        (Some(_), [h]) => (*h, 0, 0),
        (Some(_), [h, m]) => (*h, *m, 0),
        (None, [m]) => (0, *m, 0),
        (None, [m, s]) => (0, *m, *s),
        (_, [h, m, s]) => (*h, *m, *s),
        _ => return Err(TimeError::Grammar),
    };
    let total = |unit: Seconds, n: Seconds| n.checked_mul(unit);
    [(86_400, days.unwrap_or(0)), (3600, h), (60, m), (1, s)]
        .into_iter()
        .try_fold(0u64, |sum, (unit, n)| sum.checked_add(total(unit, n)?))
        .filter(|sum| *sum <= MAX)
        .map(Some)
        .ok_or(TimeError::TooLarge)
}

fn number(text: &str) -> Result<Seconds, TimeError> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(TimeError::Grammar);
    }
    text.parse().map_err(|_| TimeError::TooLarge)
}

/// The minutes that Slurm keeps of a limit: rounded up.
pub fn minutes(seconds: Seconds) -> u64 {
    seconds.div_ceil(60)
}

/// Writes seconds as Slurm does: `[D-]HH:MM:SS`.
pub fn format(seconds: Seconds) -> String {
    let (d, h, m, s) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    if d > 0 { format!("{d}-{h:02}:{m:02}:{s:02}") } else { format!("{h:02}:{m:02}:{s:02}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_six_forms() {
        for (text, seconds) in [
            ("5", 300),
            ("1:30", 90),
            ("1:00:00", 3600),
            ("1-2", 93_600),
            ("1-2:03", 93_780),
            ("1-02:03:04", 93_784),
            ("7-0:00:99", 604_899),
        ] {
            assert_eq!(parse(text), Ok(Some(seconds)), "{text}");
        }
        assert_eq!(parse("UNLIMITED"), Ok(None));
        assert_eq!(format(93_784), "1-02:03:04");
        assert_eq!(format(59), "00:00:59");
    }

    #[test]
    fn bad_times_are_refused() {
        for bad in ["", "1:2:3:4", "a", "1-", "-5", "1 0", "5\n", "1-2-3"] {
            assert_eq!(parse(bad), Err(TimeError::Grammar), "{bad:?}");
        }
        assert_eq!(parse("99999999999999999999"), Err(TimeError::TooLarge));
        assert_eq!(parse("18446744073709551615-0"), Err(TimeError::TooLarge));
        assert_eq!(parse("4294967293"), Ok(Some(MAX)));
        assert_eq!(parse("4294967294"), Err(TimeError::TooLarge));
    }
}
