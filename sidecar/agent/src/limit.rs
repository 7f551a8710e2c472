//! A token bucket, with time passed in, and the count of what it refused.

use crate::cancels::Now;
use std::collections::HashMap;

/// Lets `rate` things a second pass, and `burst` at once.
#[derive(Debug)]
pub struct Bucket {
    rate: f64,
    burst: f64,
    tokens: f64,
    at: Now,
    /// How many were refused.
    pub refused: u64,
}

impl Bucket {
    /// A full bucket.
    pub fn new(rate: f64, burst: f64, now: Now) -> Self {
        Bucket { rate, burst, tokens: burst, at: now, refused: 0 }
    }

    /// Whether one more may pass.
    pub fn pass(&mut self, now: Now) -> bool {
        self.tokens = (self.tokens + now.saturating_sub(self.at).as_secs_f64() * self.rate).min(self.burst);
        self.at = now;
        if self.tokens < 1.0 {
            self.refused = self.refused.saturating_add(1);
            return false;
        }
        self.tokens -= 1.0;
        true
    }
}

/// Lines a second, and at once, that one uid can make the agent log.
const LINES: (f64, f64) = (0.1, 10.0);
/// Uids that are remembered; all of them are of jobs on this node.
const UIDS: usize = 1024;

/// Which lines may be logged about what a user's processes do: a few of each uid.
#[derive(Debug, Default)]
pub struct Lines(HashMap<u32, Bucket>);

impl Lines {
    /// Whether a line about `uid` may be logged now. The next that may tells first how many were left out.
    pub fn pass(&mut self, uid: u32, now: Now) -> bool {
        if self.0.len() >= UIDS && !self.0.contains_key(&uid) {
            self.0.clear();
        }
        let bucket = self.0.entry(uid).or_insert_with(|| Bucket::new(LINES.0, LINES.1, now));
        if !bucket.pass(now) {
            return false;
        }
        let left_out = std::mem::take(&mut bucket.refused);
        if left_out > 0 {
            tracing::warn!(uid, "{left_out} lines about this user's processes were left out");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_cannot_fill_the_log_nor_the_memory() {
        let (mut lines, at) = (Lines::default(), Duration::from_secs);
        assert_eq!((0..100).filter(|_| lines.pass(10, at(0))).count(), 10);
        assert!(lines.pass(11, at(0)) && !lines.pass(10, at(5)) && lines.pass(10, at(10)));
        assert_eq!((0..5000).filter(|&uid| lines.pass(uid, at(0))).count(), 4999);
        assert!(lines.0.len() <= UIDS);
    }
    use std::time::Duration;

    #[test]
    fn a_burst_and_then_the_rate() {
        let at = |ms| Duration::from_millis(ms);
        let mut b = Bucket::new(10.0, 3.0, at(0));
        assert_eq!((0..5).filter(|_| b.pass(at(0))).count(), 3);
        assert!(!b.pass(at(50)) && b.pass(at(150)) && !b.pass(at(150)));
        assert_eq!(b.refused, 4);
        assert_eq!((0..50).filter(|_| b.pass(at(60_000))).count(), 3);
    }
}
