//! From one look at the GPUs to the next: what is gone is lost, never forgotten.

use pliant_model::gpu::{BusId, Gpu, Happening, NodeGpus, Pair};

/// One look: the GPUs, and how pairs of them reach each other, by bus id.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Look {
    /// Version of the driver.
    pub driver: Option<String>,
    /// Those that answered.
    pub gpus: Vec<Gpu>,
    /// Pairs of those.
    pub pairs: Vec<(BusId, BusId, Pair)>,
}

/// What is known after a look, and what happened since the one before, by UUID. `why` is NVML's word for a card that is
/// gone.
pub fn merge(old: &NodeGpus, look: Look, why: &str) -> (NodeGpus, Vec<(String, Happening)>) {
    let mut happened = vec![];
    let mut gpus = look.gpus;
    for gpu in &gpus {
        if old.gpus.iter().any(|g| g.uuid == gpu.uuid && g.lost.is_some()) {
            happened.push((gpu.uuid.clone(), Happening::Back));
        }
    }
    for gone in &old.gpus {
        // Another card in its slot: it has been replaced.
        if gpus.iter().any(|n| n.uuid == gone.uuid || n.bus == gone.bus) {
            continue;
        }
        if gone.lost.is_none() {
            happened.push((gone.uuid.clone(), Happening::Lost { why: why.to_owned() }));
        }
        gpus.push(Gpu { lost: gone.lost.clone().or_else(|| Some(why.to_owned())), ..gone.clone() });
    }
    gpus.sort_by(|a, b| a.bus.cmp(&b.bus));
    let position = |bus: &BusId| gpus.iter().position(|g| g.bus == *bus).and_then(|p| u32::try_from(p).ok());
    let mut pairs: Vec<Pair> = look
        .pairs
        .iter()
        .filter_map(|(a, b, pair)| {
            let (a, b) = (position(a)?, position(b)?);
            Some(Pair { a: a.min(b), b: a.max(b), ..pair.clone() })
        })
        .collect();
    // How a lost card was joined stays known: it is what is to be mended.
    let lost = |g: &Gpu| gpus.iter().any(|n| n.uuid == g.uuid && n.lost.is_some());
    for pair in &old.pairs {
        let at = |p: u32| usize::try_from(p).ok().and_then(|p| old.gpus.get(p));
        if let (Some(a), Some(b)) = (at(pair.a), at(pair.b))
            && (lost(a) || lost(b))
            && let (Some(a), Some(b)) = (position(&a.bus), position(&b.bus))
            && !pairs.iter().any(|p| (p.a, p.b) == (a.min(b), a.max(b)))
        {
            pairs.push(Pair { a: a.min(b), b: a.max(b), ..pair.clone() });
        }
    }
    pairs.sort_by_key(|p| (p.a, p.b));
    let known = NodeGpus { boot_id: old.boot_id.clone(), driver: look.driver, gpus, pairs, ..NodeGpus::default() };
    (known, happened)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A plain GPU.
    pub fn gpu(index: u32) -> Gpu {
        let bus = format!("0000:{:02x}:00.0", index + 1).parse().unwrap();
        Gpu { minor: Some(index), ..Gpu::new(format!("GPU-{index}"), bus, index) }
    }

    fn look(indexes: &[u32]) -> Look {
        Look { gpus: indexes.iter().map(|i| gpu(*i)).collect(), ..Look::default() }
    }

    #[test]
    fn a_card_that_is_gone_keeps_its_place_and_comes_back() {
        let (all, happened) = merge(&NodeGpus::default(), look(&[0, 1, 2]), "");
        assert!(happened.is_empty());
        let (two, happened) = merge(&all, look(&[0, 2]), "fallen off the bus");
        assert_eq!(happened, [("GPU-1".to_owned(), Happening::Lost { why: "fallen off the bus".into() })]);
        let uuids = |n: &NodeGpus| n.gpus.iter().map(|g| g.uuid.clone()).collect::<Vec<_>>();
        assert_eq!(uuids(&two), uuids(&all), "nobody else moves");
        assert!(merge(&two, look(&[0, 2]), "x").1.is_empty(), "told once");
        let (back, happened) = merge(&two, look(&[0, 1, 2]), "");
        assert_eq!((happened, back.gpus), (vec![("GPU-1".to_owned(), Happening::Back)], all.gpus));
    }

    #[test]
    fn another_card_in_the_slot_replaces_it() {
        let (all, _) = merge(&NodeGpus::default(), look(&[0, 1]), "");
        let mut new = look(&[0, 1]);
        new.gpus[1].uuid = "GPU-new".into();
        let (after, happened) = merge(&all, new, "x");
        assert_eq!((after.gpus.len(), happened.len()), (2, 0));
    }

    #[test]
    fn pairs_follow_their_cards() {
        let pair = |a: u32, b: u32| (gpu(a).bus, gpu(b).bus, Pair { a: 0, b: 0, path: None, peer_access: Some(true) });
        let mut l = look(&[0, 2]);
        l.pairs = vec![pair(2, 0)];
        let (all, _) = merge(&NodeGpus::default(), look(&[0, 1, 2]), "");
        let (now, _) = merge(&all, l, "x");
        assert_eq!(now.pairs, [Pair { a: 0, b: 2, path: None, peer_access: Some(true) }]);
        // A card that is lost keeps what joined it.
        let (gone, _) = merge(&now, look(&[0]), "x");
        assert_eq!(gone.pairs, now.pairs);
    }
}
