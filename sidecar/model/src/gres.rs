//! GPUs in Slurm's texts: GRES (`gpu:a100:4(IDX:0-3)`, `gpu:2(S:0-1)`), TRES (`cpu=4,gres/gpu=2`) and counts.

use crate::ids::GpuCount;

/// One entry of a GRES text that names GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuGres {
    /// The type, where one is given (`a100`); `(null)` counts as none.
    pub kind: Option<String>,
    /// How many.
    pub count: GpuCount,
    /// Slurm's GRES indexes in use, from `(IDX:…)`; empty where Slurm gives none or `N/A`.
    pub indexes: Vec<u32>,
}

/// The GPU entries of a GRES text such as `gpu:a100:2(IDX:0,3),gpu:h100:1(S:0),shard:8`. Other GRES are left out.
/// A count that cannot be read gives no entry.
pub fn gpus(text: &str) -> Vec<GpuGres> {
    split_top(text).filter_map(gpu_entry).collect()
}

/// The number of GPUs in a GRES text, all types together.
pub fn gpu_total(text: &str) -> GpuCount {
    gpus(text).iter().map(|g| g.count).fold(0, GpuCount::saturating_add)
}

/// The indexes of all GPUs in a GRES text, ascending.
pub fn gpu_indexes(text: &str) -> Vec<u32> {
    let mut all: Vec<u32> = gpus(text).into_iter().flat_map(|g| g.indexes).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Splits at the commas that stand outside parentheses.
fn split_top(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0i32;
    text.split(move |c| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        c == ',' && depth <= 0
    })
    .map(str::trim)
    .filter(|s| !s.is_empty())
}

fn gpu_entry(entry: &str) -> Option<GpuGres> {
    let (head, tail) = match entry.rfind('(').filter(|_| !entry.ends_with("(null)")) {
        Some(at) => entry.split_at(at),
        None => (entry, ""),
    };
    let head = head.strip_prefix("gres:").or_else(|| head.strip_prefix("gres/")).unwrap_or(head);
    let rest = head.strip_prefix("gpu")?;
    let rest = match rest.strip_prefix(':') {
        Some(rest) => rest,
        // The old form `gpu(IDX:2,4)` counts by its list.
        None if rest.is_empty() => {
            let indexes = indexes(tail);
            let count = GpuCount::try_from(indexes.len()).unwrap_or(0).max(u32::from(tail.is_empty()));
            return Some(GpuGres { kind: None, count, indexes });
        }
        None => return None,
    };
    let (kind, count) = match rest.rsplit_once(':') {
        Some((kind, n)) => (Some(kind), count_of(n)?),
        None => match count_of(rest) {
            Some(n) => (None, n),
            None => (Some(rest), 1),
        },
    };
    let kind = kind.map(|k| k.split('(').next().unwrap_or(k)).filter(|k| !k.is_empty());
    Some(GpuGres { kind: kind.map(str::to_owned), count, indexes: indexes(tail) })
}

/// `(IDX:0-1,3)`; sockets `(S:0-1)` are no indexes.
fn indexes(tail: &str) -> Vec<u32> {
    tail.strip_prefix("(IDX:").and_then(|t| t.strip_suffix(')')).map(ranges).unwrap_or_default()
}

/// Why a text is no count of GPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no count of GPUs such as 4, a100:4 or a100:2,h100:2")]
pub struct CountError(pub String);

/// The count that variables such as `SLURM_GPUS_PER_NODE` hold: `4`, `a100:4`, `a100:2,h100:2`, and a type alone is one.
///
/// # Errors
/// What is neither (`4k`, `a100:x`, nothing).
pub fn count(text: &str) -> Result<GpuCount, CountError> {
    let bad = || CountError(text.chars().take(60).collect());
    let name = |t: &str| {
        t.starts_with(|c: char| c.is_ascii_alphabetic())
            && t.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'))
    };
    let one = |part: &str| match part.rsplit_once(':') {
        Some((kind, n)) if name(kind) => count_of(n),
        Some(_) => None,
        None => count_of(part).or_else(|| name(part).then_some(1)),
    };
    let mut parts = text.trim().split(',').map(|p| one(p.trim()).ok_or_else(bad));
    parts.try_fold(0, |sum: GpuCount, n| sum.checked_add(n?).ok_or_else(bad))
}

/// Slurm's sizes (`6.50G`, `40000M`, `128G`, `1T`, plain numbers are MiB) in MiB, rounded down.
pub fn size_mib(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, unit) = match text.chars().last()?.to_ascii_uppercase() {
        'K' => (text.get(..text.len() - 1)?, 1_u64),
        'M' => (text.get(..text.len() - 1)?, 1 << 10),
        'G' => (text.get(..text.len() - 1)?, 1 << 20),
        'T' => (text.get(..text.len() - 1)?, 1 << 30),
        'P' => (text.get(..text.len() - 1)?, 1 << 40),
        _ => (text, 1 << 10),
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |t: &str| (t.len() <= 12 && t.bytes().all(|b| b.is_ascii_digit())).then(|| t.parse::<u64>().ok())?;
    let scale = 10_u64.checked_pow(u32::try_from(part.len()).ok()?)?;
    let kib = digits(whole)?.checked_mul(unit)?.checked_add(digits(part)?.checked_mul(unit)? / scale)?;
    Some(kib >> 10)
}

fn count_of(text: &str) -> Option<GpuCount> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// `0-1,3` -> 0, 1, 3. What cannot be read, or is longer than 4096, gives nothing.
fn ranges(text: &str) -> Vec<u32> {
    let mut out = vec![];
    for part in text.split(',') {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        let (Ok(a), Ok(b)) = (a.trim().parse::<u32>(), b.trim().parse::<u32>()) else {
            return vec![];
        };
        if b < a || b - a > 4096 || out.len() > 4096 {
            return vec![];
        }
        out.extend(a..=b);
    }
    out
}

/// The GPUs of a TRES text: `cpu=4,mem=8G,gres/gpu=4` and `gres:gpu:4`, `gres/gpu:4`. Where typed and untyped
/// entries stand side by side they count the same GPUs twice, so the larger of both sums is taken. `None`: none named.
pub fn tres_gpus(text: &str) -> Option<GpuCount> {
    let (mut plain, mut typed) = (None::<GpuCount>, None::<GpuCount>);
    for entry in split_top(text) {
        let rest = entry.strip_prefix("gres/gpu").or_else(|| entry.strip_prefix("gres:gpu"));
        // `gres/gpumem` and `gres/gpuutil` are other resources.
        let Some(rest) = rest.filter(|r| r.is_empty() || r.starts_with([':', '='])) else {
            continue;
        };
        let (kind, n) = match rest.split_once('=') {
            Some((kind, n)) => (kind, count_of(n)),
            None => match rest.rsplit_once(':') {
                Some((kind, n)) if count_of(n).is_some() => (kind, count_of(n)),
                _ => (rest, Some(1)),
            },
        };
        let Some(n) = n else { continue };
        let sum = if kind.trim_matches(':').is_empty() { &mut plain } else { &mut typed };
        *sum = Some(sum.unwrap_or(0).saturating_add(n));
    }
    plain.max(typed)
}

/// The GPU type that a TRES text such as `gres/gpu:a100:4` or `gres/gpu:a100=4` names, if one.
pub fn tres_gpu_kind(text: &str) -> Option<String> {
    split_top(text).find_map(|entry| {
        let rest = entry.strip_prefix("gres/gpu:").or_else(|| entry.strip_prefix("gres:gpu:"))?;
        let kind = rest.split_once(['=', ':']).map_or(rest, |(kind, _)| kind);
        (!kind.is_empty() && count_of(kind).is_none()).then(|| kind.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gres_of_nodes_and_jobs() {
        assert_eq!(gpu_total("gpu:8"), 8);
        assert_eq!(gpu_total("gpu:a100:4(S:0-1),gpu:h100:2(S:1),shard:8"), 6);
        assert_eq!(gpu_total("(null)"), 0);
        assert_eq!(gpu_total("gpu:(null):2(IDX:0-1)"), 2);
        assert_eq!(gpu_total("gpu:tesla_v100-sxm2-32gb:1"), 1);
        assert_eq!(gpu_total("gpu:nvidia_a100_1g.5gb:7(IDX:0-6)"), 7);
        assert_eq!(gpu_indexes("gpu:2(IDX:0,3),gpu:h100:1(IDX:5)"), vec![0, 3, 5]);
        assert_eq!(gpu_indexes("gpu:0(IDX:N/A)"), Vec::<u32>::new());
        assert_eq!((gpu_total("gpu(IDX:2,4)"), gpu_indexes("gpu(IDX:2,4)")), (2, vec![2, 4]));
        assert_eq!((gpu_total("gpu:4(S:0-1)"), gpu_indexes("gpu:4(S:0-1)")), (4, vec![]));
        assert_eq!(gpus("gpu:a100").first().map(|g| (g.kind.as_deref(), g.count)), Some((Some("a100"), 1)));
    }

    #[test]
    fn counts_of_variables() {
        // B07
        for (text, n) in [("a100:4", 4), ("a100:2,h100:2", 4), ("a100", 1), ("4", 4), ("nvidia_h200_nvl_4g.71gb:2", 2)]
        {
            assert_eq!(count(text), Ok(n), "{text}");
        }
        for bad in ["4k", "", "a100:x", ":4", "-1", "4,", "a100:-2", "4294967296", "4294967295,1"] {
            assert!(count(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_with_fractions() {
        for (text, mib) in
            [("6.50G", 6656), ("62.50G", 64_000), ("40000M", 40_000), ("128G", 131_072), ("512", 512), ("2048K", 2)]
        {
            assert_eq!(size_mib(text), Some(mib), "{text}");
        }
        for bad in ["", "G", "1.x", "-1G", "99999999999999P"] {
            assert_eq!(size_mib(bad), None, "{bad}");
        }
    }

    #[test]
    fn tres_counts_typed_and_untyped_once() {
        assert_eq!(tres_gpus("cpu=2,mem=4G,node=1,billing=2,gres/gpu=4"), Some(4));
        assert_eq!(tres_gpus("gres:gpu:28"), Some(28));
        assert_eq!(tres_gpus("gres/gpu:28"), Some(28));
        assert_eq!(tres_gpus("gres/gpu=4,gres/gpu:a100=4"), Some(4));
        assert_eq!(tres_gpus("gres/gpu:a100:2"), Some(2));
        assert_eq!(tres_gpus("gres:gpu"), Some(1));
        assert_eq!(tres_gpus("cpu=2"), None);
        assert_eq!(tres_gpus("gres/gpu=2,gres/gpumem=8160M,gres/gpuutil=97"), Some(2));
        assert_eq!(tres_gpus("gres/gpuutil=97"), None);
        assert_eq!(tres_gpu_kind("gres/gpu:a100:2").as_deref(), Some("a100"));
        assert_eq!(tres_gpu_kind("cpu=1,gres/gpu:a100=2").as_deref(), Some("a100"));
        assert_eq!(tres_gpu_kind("gres/gpu:4"), None);
    }
}
