//! Lists of numbers as Slurm and Linux write them: `0-3,7`.

/// The largest number and the most numbers of a list.
pub const MAX: u32 = 65_535;

/// Why a text is no list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no list of numbers such as 0-3,7")]
pub struct IndexListError(pub String);

/// Reads a list, in the order written, duplicates kept. Empty text gives no numbers.
///
/// # Errors
/// What is no number or range, descends, or goes beyond [`MAX`].
pub fn parse(text: &str) -> Result<Vec<u32>, IndexListError> {
    let bad = || IndexListError(text.chars().take(80).collect());
    let number = |t: &str| {
        let digits = !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| t.parse::<u32>().ok()).flatten().filter(|n| *n <= MAX).ok_or_else(bad)
    };
    let mut all = vec![];
    if text.trim().is_empty() {
        return Ok(all);
    }
    for part in text.split(',').map(str::trim) {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to) = (number(from)?, number(to)?);
        let count = usize::try_from(to.checked_sub(from).ok_or_else(bad)?).map_err(|_| bad())?;
        if all.len() + count > usize::try_from(MAX).unwrap_or(usize::MAX) {
            return Err(bad());
        }
        all.extend(from..=to);
    }
    Ok(all)
}

/// Writes a list; runs are joined, order is kept.
pub fn format(numbers: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = vec![];
    for n in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*n) => *last = *n,
            _ => runs.push((*n, *n)),
        }
    }
    let show = |(a, b): &(u32, u32)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.iter().map(show).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!(parse("0-3,7"), Ok(vec![0, 1, 2, 3, 7]));
        assert_eq!(parse(""), Ok(vec![]));
        assert_eq!(format(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        for bad in ["a", "3-1", "1-", "-1", "1,,2", "0-4294967295", "70000", "1 2", "0-65535,0-65535"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
