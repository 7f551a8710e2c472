//! Results as JSON lines: {bench, case, metric, value, unit, limit, ok}.

use serde::Serialize;

/// One figure beside its limit.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    bench: &'static str,
    case: String,
    metric: String,
    value: f64,
    unit: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<f64>,
    ok: bool,
}

/// Prints figures as they come and remembers whether all held.
#[derive(Debug)]
pub struct Report {
    bench: &'static str,
    short: u32,
}

impl Report {
    /// For one bench.
    pub fn new(bench: &'static str) -> Self {
        Report { bench, short: 0 }
    }

    /// A figure that must not be above `limit`.
    pub fn at_most(&mut self, case: &str, metric: &str, value: f64, unit: &'static str, limit: f64) {
        self.print(case, metric, value, unit, Some(limit), value <= limit);
    }

    /// A figure that must not be below `limit`.
    pub fn at_least(&mut self, case: &str, metric: &str, value: f64, unit: &'static str, limit: f64) {
        self.print(case, metric, value, unit, Some(limit), value >= limit);
    }

    /// A figure without a limit.
    pub fn note(&mut self, case: &str, metric: &str, value: f64, unit: &'static str) {
        self.print(case, metric, value, unit, None, true);
    }

    /// Whether figures that another process has printed held.
    pub fn also(&mut self, ok: bool) {
        self.short += u32::from(!ok);
    }

    fn print(&mut self, case: &str, metric: &str, value: f64, unit: &'static str, limit: Option<f64>, ok: bool) {
        let value = (value * 1000.0).round() / 1000.0;
        let figure =
            Figure { bench: self.bench, case: case.to_owned(), metric: metric.to_owned(), value, unit, limit, ok };
        println!("{}", serde_json::to_string(&figure).unwrap_or_default());
        self.short += u32::from(!ok);
    }

    /// Whether every figure held.
    pub fn ok(&self) -> bool {
        self.short == 0
    }
}

/// The value below which a share `p` of the samples lies (nearest rank); NaN, which holds no limit, without samples.
pub fn percentile(samples: &[f64], p: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    let rank = (1..=n).find(|r| {
        f64::from(u32::try_from(*r).unwrap_or(u32::MAX)) >= p * f64::from(u32::try_from(n).unwrap_or(u32::MAX))
    });
    rank.and_then(|r| sorted.get(r - 1)).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::percentile;

    #[test]
    fn nearest_rank() {
        let samples: Vec<f64> = (1..=20).rev().map(f64::from).collect();
        assert_eq!((percentile(&samples, 0.5), percentile(&samples, 0.95)), (10.0, 19.0));
        assert!(percentile(&[], 0.5).is_nan());
    }
}
