//! A resize as a saga: every arrow is durable before it is acted on, and again when it is observed.
//!
//! ```text
//! grow    Proposed -> Requested -> Granted -> Announced -> Joined -> Settled
//! shrink  Proposed -> Announced -> Drained -> Released -> Confirmed
//! ```
//! Any of them may end in Undone, with a reason.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// More GPUs.
    Grow,
    /// Fewer.
    Shrink,
}

/// Where a resize stands. The order of the variants is the order of the arrows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Decided and durable; nobody has been told.
    Proposed,
    /// Grow: the launcher has been told to ask Slurm for the slices.
    Requested,
    /// Grow: Slurm has allocated them.
    Granted,
    /// The ranks have been told that the world changes.
    Announced,
    /// Grow: the newcomers have finished their first step.
    Joined,
    /// Shrink: all ranks have left at a boundary, or the grace is over.
    Drained,
    /// Shrink: the slices have been given back to Slurm.
    Released,
    /// Shrink, final: Slurm shows the GPUs idle.
    Confirmed,
    /// Grow, final.
    Settled,
    /// Final: it did not come about; what had been done was taken back.
    Undone,
}

impl Kind {
    /// The arrows in order, final state included.
    pub fn arrows(self) -> &'static [State] {
        match self {
            Kind::Grow => {
                &[State::Proposed, State::Requested, State::Granted, State::Announced, State::Joined, State::Settled]
            }
            Kind::Shrink => &[State::Proposed, State::Announced, State::Drained, State::Released, State::Confirmed],
        }
    }

    /// The states after `from` up to and including `to`; empty where `to` does not lie ahead. A late or repeated
    /// observation is thereby harmless.
    pub fn between(self, from: State, to: State) -> &'static [State] {
        let arrows = self.arrows();
        let at = |s| arrows.iter().position(|&a| a == s);
        match (at(from), at(to)) {
            (Some(a), Some(b)) if a < b => arrows.get(a + 1..=b).unwrap_or_default(),
            _ => &[],
        }
    }
}

impl State {
    /// Whether nothing more will happen.
    pub fn is_final(self) -> bool {
        matches!(self, State::Settled | State::Confirmed | State::Undone)
    }

    /// The word in the journal and on screens.
    pub fn word(self) -> &'static str {
        match self {
            State::Proposed => "proposed",
            State::Requested => "requested",
            State::Granted => "granted",
            State::Announced => "announced",
            State::Joined => "joined",
            State::Drained => "drained",
            State::Released => "released",
            State::Confirmed => "confirmed",
            State::Settled => "settled",
            State::Undone => "undone",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Grow => "grow",
            Kind::Shrink => "shrink",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_forward() {
        use State::*;
        assert_eq!(Kind::Grow.between(Requested, Announced), [Granted, Announced]);
        assert!(Kind::Grow.between(Announced, Granted).is_empty());
        assert!(Kind::Grow.between(Granted, Granted).is_empty());
        assert!(Kind::Shrink.between(Proposed, Joined).is_empty());
        assert_eq!(Kind::Shrink.between(Drained, Confirmed), [Released, Confirmed]);
        for kind in [Kind::Grow, Kind::Shrink] {
            let (last, rest) = kind.arrows().split_last().unwrap();
            assert!(last.is_final() && rest.iter().all(|s| !s.is_final()));
        }
    }
}
