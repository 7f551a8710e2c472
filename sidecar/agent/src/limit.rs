//! A token bucket, with time passed in, and the count of what it refused.

use crate::cancels::Now;

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

#[cfg(test)]
mod tests {
    use super::*;
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
