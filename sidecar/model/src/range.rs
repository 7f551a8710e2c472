//! `[MIN-]MAX[:STEP]`: how many GPUs an elastic job takes, over the whole job.
//!
//! Slurm's own range syntax (`-N 1-15:4`). MIN, where given, must equal what the native flags ask for; 0 is
//! allowed as MIN (a base without GPUs) and never as MAX or STEP. Sizes are MIN, MIN + STEP, MIN + 2·STEP, …

use crate::ids::GpuCount;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// The largest MAX accepted: more GPUs than any Slurm cluster holds, and far from overflow.
pub const MAX_GPUS: GpuCount = 65_536;

/// The grammar as shown to users.
pub const GRAMMAR: &str = "[MIN-]MAX[:STEP]";

/// What a user typed after `--elastic=`, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuRange {
    /// MIN as typed; `None` means "what the native flags ask for".
    pub min: Option<GpuCount>,
    /// Most GPUs over the whole job.
    pub max: GpuCount,
    /// Sizes differ from MIN by multiples of this.
    pub step: GpuCount,
}

/// Why a text is no range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// Not digits where a count belongs.
    #[error("expected {GRAMMAR} with whole numbers, such as 8, 2-8 or 4-16:4")]
    Grammar,
    /// MIN above MAX.
    #[error("MIN {min} is above MAX {max}")]
    Reversed {
        /// MIN as typed.
        min: GpuCount,
        /// MAX as typed.
        max: GpuCount,
    },
    /// MAX is zero.
    #[error("MAX must be at least 1")]
    ZeroMax,
    /// STEP is zero.
    #[error("STEP must be at least 1")]
    ZeroStep,
    /// A count above [`MAX_GPUS`].
    #[error("counts go up to {MAX_GPUS}")]
    TooLarge,
}

fn count(text: &str) -> Result<GpuCount, RangeError> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(RangeError::Grammar);
    }
    match text.parse::<GpuCount>() {
        Ok(n) if n <= MAX_GPUS => Ok(n),
        _ => Err(RangeError::TooLarge),
    }
}

impl FromStr for GpuRange {
    type Err = RangeError;

    fn from_str(text: &str) -> Result<Self, RangeError> {
        let (sizes, step) = match text.split_once(':') {
            Some((sizes, step)) => (sizes, count(step)?),
            None => (text, 1),
        };
        let (min, max) = match sizes.split_once('-') {
            Some((min, max)) => (Some(count(min)?), count(max)?),
            None => (None, count(sizes)?),
        };
        if step == 0 {
            return Err(RangeError::ZeroStep);
        }
        if max == 0 {
            return Err(RangeError::ZeroMax);
        }
        match min {
            Some(min) if min > max => Err(RangeError::Reversed { min, max }),
            _ => Ok(GpuRange { min, max, step }),
        }
    }
}

impl fmt::Display for GpuRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(min) = self.min {
            write!(f, "{min}-")?;
        }
        write!(f, "{}", self.max)?;
        if self.step != 1 {
            write!(f, ":{}", self.step)?;
        }
        Ok(())
    }
}

impl GpuRange {
    /// The next allowed size above `n`; `None`: `n` is the largest.
    pub fn next(&self, base: GpuCount, n: GpuCount) -> Option<GpuCount> {
        let steps = n.saturating_sub(base) / self.step.max(1) + 1;
        let next = base.saturating_add(steps.saturating_mul(self.step));
        (next > n && next <= self.max).then_some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn err(text: &str) -> RangeError {
        text.parse::<GpuRange>().unwrap_err()
    }

    #[test]
    fn the_forms_of_the_grammar() {
        let r = |min, max, step| GpuRange { min, max, step };
        assert_eq!("8".parse(), Ok(r(None, 8, 1)));
        assert_eq!("2-8".parse(), Ok(r(Some(2), 8, 1)));
        assert_eq!("0-16:4".parse(), Ok(r(Some(0), 16, 4)));
        assert_eq!("4:2".parse(), Ok(r(None, 4, 2)));
    }

    #[test]
    fn bad_texts_say_why() {
        assert_eq!(err("16-4"), RangeError::Reversed { min: 16, max: 4 });
        assert_eq!(err("0"), RangeError::ZeroMax);
        assert_eq!(err("0-0"), RangeError::ZeroMax);
        assert_eq!(err("4294967296"), RangeError::TooLarge);
        assert_eq!(err("4-16:0"), RangeError::ZeroStep);
        for bad in ["", "-1", "8\n", " 8", "+8", "8-", "4-8-9", "4:2:2", "$(id)", "٣", "1e3"] {
            assert_eq!(err(bad), RangeError::Grammar, "{bad:?}");
        }
        assert_eq!(err(&"9".repeat(1 << 20)), RangeError::TooLarge);
    }

    #[test]
    fn next_leads_back_to_the_steps() {
        let r: GpuRange = "2-16:4".parse().unwrap();
        assert_eq!([2, 4, 6, 13, 14, 16].map(|n| r.next(2, n)), [Some(6), Some(6), Some(10), Some(14), None, None]);
    }

    proptest! {
        #[test]
        fn what_is_shown_parses_back(min in proptest::option::of(0u32..100), extra in 1u32..100, step in 1u32..9) {
            let r = GpuRange { min, max: min.unwrap_or(0) + extra, step };
            prop_assert_eq!(r.to_string().parse::<GpuRange>(), Ok(r));
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = text.parse::<GpuRange>();
        }
    }
}
