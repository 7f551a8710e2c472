//! MIG instances: chosen one by one, on the GPUs that are cut up and used already.

use super::NoPlace;
use pliant_model::GpuCount;

/// The instances of one profile on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instances {
    /// Position of the GPU.
    pub gpu: usize,
    /// Instances of the profile.
    pub all: GpuCount,
    /// Those of them that are free.
    pub free: GpuCount,
}

/// Takes `want` instances: from GPUs in use before untouched ones, fullest first, so that whole GPUs stay whole. Gives
/// position and count.
///
/// # Errors
/// [`NoPlace::TooFew`]
pub fn choose_instances(gpus: &[Instances], want: GpuCount) -> Result<Vec<(usize, GpuCount)>, NoPlace> {
    let free: GpuCount = gpus.iter().map(|g| g.free).sum();
    if free < want || want == 0 {
        return Err(NoPlace::TooFew { want, free });
    }
    let mut order: Vec<&Instances> = gpus.iter().filter(|g| g.free > 0).collect();
    order.sort_by_key(|g| (g.free == g.all, g.free, g.gpu));
    let mut missing = want;
    let mut taken = vec![];
    for g in order {
        let take = g.free.min(missing);
        if take > 0 {
            taken.push((g.gpu, take));
        }
        missing -= take;
    }
    Ok(taken)
}
