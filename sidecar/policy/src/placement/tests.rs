//! Boxes, cells and the properties of choices.

use super::*;
use pliant_model::NodeName;
use pliant_model::topology::{Gpu, Link, LinkKind, NodeTopology, Path, Source, Switch, SwitchKind, Switches};
use proptest::prelude::*;

type Links<'a> = &'a [(usize, usize, u32)];

fn node(n: usize, numa: &[u32], links: Links<'_>) -> NodeTopology {
    let gpu = |i: usize| Gpu { name: format!("GPU{i}"), numa: numa.get(i).copied(), ..Gpu::default() };
    let mut t = NodeTopology::unlinked(Source::Capture, (0..n).map(gpu).collect());
    for (a, b, count) in links {
        t.set_link(*a, *b, Link::nvlink(*count, Some(2)));
    }
    t
}

const CUBE: Links<'_> = &[
    (0, 1, 1),
    (0, 2, 1),
    (0, 3, 2),
    (0, 4, 2),
    (1, 2, 2),
    (1, 3, 1),
    (1, 5, 2),
    (2, 3, 2),
    (2, 6, 1),
    (3, 7, 1),
    (4, 5, 1),
    (4, 6, 1),
    (4, 7, 2),
    (5, 6, 2),
    (5, 7, 1),
    (6, 7, 2),
];

/// Eight V100 in a hybrid cube mesh: two quads.
fn cube() -> NodeTopology {
    node(8, &[0, 0, 0, 0, 1, 1, 1, 1], CUBE)
}

fn switched(n: usize, numa: &[u32]) -> NodeTopology {
    let mut t = node(n, numa, &[]);
    for a in 0..n {
        for b in a + 1..n {
            t.set_link(a, b, Link { kind: LinkKind::NvSwitch, ..Link::nvlink(12, Some(3)) });
        }
    }
    t
}

fn best(t: &NodeTopology, free: &[usize], gpus: u32) -> Vec<usize> {
    let tables = Tables::new(t).unwrap();
    tables.choose(GpuSet::of(free.iter().copied()), &Want::gpus(gpus)).unwrap().set.iter().collect()
}

fn all(t: &NodeTopology, gpus: u32) -> Vec<usize> {
    best(t, &(0..t.gpus.len()).collect::<Vec<_>>(), gpus)
}

#[test]
fn subsets_are_all_and_each_once() {
    let set = GpuSet::of([1, 3, 4, 6]);
    let pairs: Vec<Vec<usize>> = set.subsets(2).map(|s| s.iter().collect()).collect();
    assert_eq!(pairs, [[1, 3], [1, 4], [3, 4], [1, 6], [3, 6], [4, 6]]);
    assert_eq!(set.subsets(0).count(), 1);
    assert_eq!((set.subsets(4).count(), set.subsets(5).count()), (1, 0));
    assert_eq!(GpuSet::first(16).subsets(8).count(), 12_870);
}

#[test]
fn the_cube_is_used_by_its_quads() {
    // B11: with an empty box a pair inside a quad, never 0-4 or 1-5, which break both.
    let t = cube();
    let pair = all(&t, 2);
    assert!([[0, 3], [1, 2]].contains(&[pair[0], pair[1]]), "{pair:?}");
    let tables = Tables::new(&t).unwrap();
    let three = tables.choose(GpuSet::first(8), &Want::gpus(3)).unwrap();
    assert_eq!(three.why.links, 5);
    let four = tables.choose(GpuSet::first(8), &Want::gpus(4)).unwrap();
    assert_eq!((four.set, four.why.links, four.why.broken), (GpuSet(0x0f), 9, [0, 0, 1]));
    // With a quad half used a pair takes its other half.
    assert_eq!(best(&t, &[1, 2, 4, 5, 6, 7], 2), [1, 2]);
}

#[test]
fn linked_pairs_come_first() {
    // B08: linked pairs 0-2, 1-3, 4-5, 6-7, all free.
    let t = node(8, &[], &[(0, 2, 2), (1, 3, 2), (4, 5, 2), (6, 7, 2)]);
    assert_eq!(all(&t, 2), [0, 2]);
    assert_eq!(best(&t, &[0, 1, 3, 4, 6], 2), [1, 3]);
    // A single fills a broken pair.
    assert_eq!(best(&t, &[0, 1, 3, 4, 5], 1), [0]);
    let odd = node(3, &[0, 0, 0], &[(0, 1, 4)]);
    assert_eq!(all(&odd, 1), [2]);
    let why = Tables::new(&odd).unwrap().choose(GpuSet(0b011), &Want::gpus(1)).unwrap().why;
    assert_eq!(
        (why.broken, why.to_string()),
        ([1, 0, 0], "one GPU, 1 NUMA node(s), breaks 1 pair(s), leaves 1 free".into())
    );
}

#[test]
fn equal_links_numa_decides_and_links_outrank_it() {
    let a100 = switched(8, &[3, 3, 1, 1, 7, 7, 5, 5]);
    assert_eq!(all(&a100, 2), [0, 1]);
    assert_eq!(best(&a100, &[1, 2, 4, 6, 7], 2), [6, 7]);
    let across = node(4, &[0, 1, 2, 3], &[(0, 1, 12), (2, 3, 12)]);
    assert_eq!(best(&across, &[0, 2, 3], 2), [2, 3]);
    let ring = node(4, &[0, 0, 1, 1], &[(0, 1, 2), (0, 2, 2), (2, 3, 2), (1, 3, 1)]);
    let tables = Tables::new(&ring).unwrap();
    let three = tables.choose(GpuSet::first(4), &Want::gpus(3)).unwrap();
    assert_eq!(three.why.links, 4);
}

#[test]
fn models_are_never_mixed() {
    let mut t = node(5, &[1, 0, 0, 0, 0], &[]);
    for (gpu, model) in t.gpus.iter_mut().zip(["a", "a", "b", "b", "b"]) {
        gpu.model = Some(model.into());
    }
    let tables = Tables::new(&t).unwrap();
    let four = tables.choose(GpuSet::first(5), &Want::gpus(4)).unwrap_err();
    assert_eq!(four, NoPlace::Models { want: 4, most: 3 });
    assert_eq!(tables.choose(GpuSet::first(5), &Want::gpus(3)).unwrap().set, GpuSet(0b11100));
    let named = Want { model: Some("a".into()), ..Want::gpus(3) };
    assert_eq!(tables.choose(GpuSet::first(5), &named).unwrap_err(), NoPlace::TooFew { want: 3, free: 2 });
}

#[test]
fn a_fabric_that_is_not_ready_and_lost_gpus() {
    let mut t = switched(4, &[0, 0, 0, 0]);
    t.gpus.iter_mut().for_each(|g| g.fabric_down = true);
    t.gpus[0].lost = true;
    let tables = Tables::new(&t).unwrap();
    assert_eq!(tables.choose(GpuSet::first(4), &Want::gpus(1)).unwrap().set, GpuSet(0b0010));
    assert_eq!(tables.choose(GpuSet::first(4), &Want::gpus(2)).unwrap_err(), NoPlace::FabricDown { want: 2 });
    assert_eq!(tables.choose(GpuSet::first(4), &Want::gpus(4)).unwrap_err(), NoPlace::TooFew { want: 4, free: 3 });
}

#[test]
fn a_separated_slice_counts_its_own_links_only() {
    let t = node(8, &[], &[(0, 1, 2), (0, 2, 4), (2, 3, 2), (4, 5, 2)]);
    let tables = Tables::new(&t).unwrap();
    let base = GpuSet::of([0]);
    let joined = Want { beside: base, ..Want::gpus(1) };
    assert_eq!(tables.choose(GpuSet::first(8), &joined).unwrap().set, GpuSet::of([2]));
    let separated = Want { beside: base, separated: true, ..Want::gpus(2) };
    assert_eq!(tables.choose(GpuSet::first(8).without(base), &separated).unwrap().set, GpuSet::of([2, 3]));
}

#[test]
fn instances_fill_gpus_in_use() {
    let of = |gpu, all, free| Instances { gpu, all, free };
    let gpus = [of(0, 7, 7), of(1, 7, 5), of(2, 7, 2)];
    assert_eq!(choose_instances(&gpus, 3), Ok(vec![(2, 2), (1, 1)]));
    assert_eq!(choose_instances(&gpus, 15), Err(NoPlace::TooFew { want: 15, free: 14 }));
}

/// Two spines of two leaves of four nodes with eight GPUs.
fn cluster() -> Cells {
    let leaf = |i: usize| Switch {
        name: format!("leaf{i}"),
        kind: SwitchKind::Switch,
        nodes: (0..4).map(|n| NodeName(format!("n{}", i * 4 + n))).collect(),
        children: vec![],
        line: 0,
    };
    let spine = |i: usize| Switch {
        name: format!("spine{i}"),
        children: vec![format!("leaf{}", 2 * i), format!("leaf{}", 2 * i + 1)],
        ..Switch::default()
    };
    let switches = Switches { switches: (0..4).map(leaf).chain((0..2).map(spine)).collect(), block_sizes: vec![] };
    let nodes: Vec<(NodeName, usize)> = (0..16).map(|n| (NodeName(format!("n{n}")), 0)).collect();
    Cells::new(&switches, vec![Tables::new(&cube()).unwrap()], &nodes)
}

fn place(cells: &mut Cells, gpus: u32, scope: Scope) -> Result<(Vec<usize>, usize), NoPlace> {
    let found = cells.choose(&Request { gpus, scope, ..Request::default() })?;
    for (node, choice) in &found.nodes {
        assert!(cells.free(*node).holds(choice.set));
    }
    Ok((found.nodes.iter().map(|(n, _)| *n).collect(), found.level))
}

#[test]
fn the_smallest_cell_and_the_fullest() {
    let mut c = cluster();
    assert_eq!(place(&mut c, 8, Scope::Any), Ok((vec![0], 0)));
    assert_eq!(place(&mut c, 32, Scope::Any), Ok((vec![0, 1, 2, 3], 1)));
    assert_eq!(place(&mut c, 40, Scope::Any).map(|p| p.1), Ok(2));
    assert_eq!(place(&mut c, 72, Scope::Any).map(|p| p.1), Ok(3));
    assert!(place(&mut c, 40, Scope::Leaf).is_err() && place(&mut c, 9, Scope::Node).is_err());
    // A leaf in use takes the next small job, and a node in use the next pair.
    c.set_free(4, GpuSet(0b1111_0110));
    assert_eq!(place(&mut c, 2, Scope::Any), Ok((vec![4], 0)));
    assert_eq!(place(&mut c, 8, Scope::Any), Ok((vec![5], 0)));
    // 20 GPUs: two whole nodes and half of the broken one.
    assert_eq!(place(&mut c, 20, Scope::Any), Ok((vec![5, 6, 4], 1)));
    assert_eq!(place(&mut c, 129, Scope::Any), Err(NoPlace::TooFew { want: 129, free: 126 }));
}

#[test]
fn models_and_lost_cards_hold_between_nodes_too() {
    let of = |model: &str| {
        let mut t = cube();
        t.gpus.iter_mut().for_each(|g| g.model = Some(model.into()));
        t
    };
    let mut broken = of("b");
    broken.gpus[3].lost = true;
    let shapes = [of("a"), of("b"), broken].map(|t| Tables::new(&t).unwrap()).to_vec();
    let nodes: Vec<(NodeName, usize)> =
        [0, 0, 0, 1, 1, 2].iter().enumerate().map(|(i, s)| (NodeName(format!("n{i}")), *s)).collect();
    let mut c = Cells::new(&Switches::default(), shapes, &nodes);
    assert_eq!(c.free(5).len(), 7, "a lost card is never free");
    let mut place = |gpus, model: Option<&str>| {
        let request = Request { gpus, model: model.map(str::to_owned), ..Request::default() };
        c.choose(&request).map(|p| p.nodes.iter().map(|(n, _)| *n).collect::<Vec<_>>())
    };
    assert_eq!(place(16, Some("b")), Ok(vec![3, 4]));
    assert_eq!(place(24, None), Ok(vec![0, 1, 2]));
    assert!(matches!(place(40, None), Err(NoPlace::Apart { want: 40, free: 47, .. })), "models are never mixed");
    assert_eq!(place(0, None), Err(NoPlace::TooFew { want: 0, free: 47 }));
}

#[test]
fn a_lost_card_breaks_its_pair_for_good() {
    let mut t = node(4, &[], &[(0, 1, 2), (2, 3, 2)]);
    t.gpus[3].lost = true;
    assert_eq!(all(&t, 1), [2]);
    let mut mixed = node(4, &[], &[(0, 1, 2), (2, 3, 2)]);
    mixed.gpus.iter_mut().zip(["a", "b", "b", "a"]).for_each(|(g, m)| g.model = Some(m.into()));
    let want = Want { beside: GpuSet(0b1), separated: true, ..Want::gpus(1) };
    assert_eq!(Tables::new(&mixed).unwrap().choose(GpuSet(0b1110), &want).unwrap().set, GpuSet(0b1000));
}

#[test]
fn narrow_before_whole() {
    let mut c = cluster();
    for n in 0..16 {
        // Halves at the leaf of n0 to n3; one whole node at each other leaf.
        c.set_free(
            n,
            GpuSet(if n < 4 {
                0x0f
            } else if n % 4 == 0 {
                0xff
            } else {
                0
            }),
        );
    }
    assert_eq!(place(&mut c, 12, Scope::Any).map(|p| p.1), Ok(1), "three halves at one leaf, not across a spine");
}

#[test]
fn pieces_where_no_node_is_whole() {
    let mut c = cluster();
    for n in 0..16 {
        c.set_free(n, GpuSet(if n / 4 == 2 { 0b0000_1111 } else { 0b1 }));
    }
    assert_eq!(place(&mut c, 14, Scope::Any), Ok((vec![8, 9, 10, 11], 1)));
    assert_eq!(place(&mut c, 18, Scope::Any).map(|p| p.1), Ok(2));
}

fn any_box() -> impl Strategy<Value = NodeTopology> {
    (2usize..=6, proptest::collection::vec(0u32..4, 15), proptest::collection::vec(0u32..2, 6)).prop_map(
        |(n, links, numa)| {
            let mut t = node(n, &numa, &[]);
            let mut next = links.into_iter();
            for a in 0..n {
                for b in a + 1..n {
                    match next.next().unwrap_or(0) {
                        0 => t.set_link(a, b, Link::pcie(if numa[a] == numa[b] { Path::Pix } else { Path::Sys })),
                        count => t.set_link(a, b, Link::nvlink(count, Some(2))),
                    }
                }
            }
            t
        },
    )
}

/// The best ring by trying every order.
fn by_orders(t: &NodeTopology, set: &[usize]) -> u32 {
    fn go(t: &NodeTopology, path: &mut Vec<usize>, rest: &[usize], least: u32) -> u32 {
        if rest.is_empty() {
            return least.min(t.link(path[path.len() - 1], path[0]).mb_s);
        }
        let mut best = 0;
        for (i, v) in rest.iter().enumerate() {
            let link = t.link(path[path.len() - 1], *v).mb_s;
            let mut others = rest.to_vec();
            others.remove(i);
            path.push(*v);
            best = best.max(go(t, path, &others, least.min(link)));
            path.pop();
        }
        best
    }
    go(t, &mut vec![set[0]], &set[1..], u32::MAX)
}

proptest! {
    #[test]
    fn rings_are_exact(t in any_box()) {
        let tables = Tables::new(&t).unwrap();
        for size in 2..=u32::try_from(t.gpus.len()).unwrap() {
            for set in GpuSet::first(t.gpus.len()).subsets(size) {
                prop_assert_eq!(tables.bottleneck(set), by_orders(&t, &set.iter().collect::<Vec<_>>()));
            }
        }
    }

    /// Free, of the right size, the best ring there is; among equally good ones none leaves more whole groups.
    #[test]
    fn a_choice_is_the_best_and_breaks_the_least(t in any_box(), free in 1u32..64, gpus in 1u32..5) {
        let tables = Tables::new(&t).unwrap();
        let free = GpuSet(free & GpuSet::first(t.gpus.len()).0);
        let want = Want::gpus(gpus);
        let Ok(choice) = tables.choose(free, &want) else {
            prop_assert!(free.len() < gpus);
            return Ok(());
        };
        prop_assert!(free.holds(choice.set) && choice.set.len() == gpus);
        let best = free.subsets(gpus).map(|s| tables.bottleneck(s)).max().unwrap();
        prop_assert_eq!(tables.bottleneck(choice.set), best);
        let mine = tables.key(free, choice.set, &want);
        for other in free.subsets(gpus) {
            prop_assert!(tables.key(free, other, &want) <= mine);
        }
        prop_assert_eq!(tables.choose(free, &want), Ok(choice));
    }

    /// Other names for the same GPUs give a choice of the same worth.
    #[test]
    fn names_do_not_matter(t in any_box(), turn in 0usize..6, gpus in 1u32..5) {
        let n = t.gpus.len();
        let to = |i: usize| (i * if n % 5 == 0 { 3 } else { 5 } + turn) % n;
        let mut gpus_there = t.gpus.clone();
        (0..n).for_each(|i| gpus_there[to(i)] = t.gpus[i].clone());
        let mut renamed = NodeTopology::unlinked(Source::Capture, gpus_there);
        (0..n).for_each(|a| (a + 1..n).for_each(|b| renamed.set_link(to(a), to(b), t.link(a, b))));
        let (x, y) = (Tables::new(&t).unwrap(), Tables::new(&renamed).unwrap());
        let (free, want) = (GpuSet::first(n), Want::gpus(gpus));
        if let (Ok(a), Ok(b)) = (x.choose(free, &want), y.choose(free, &want)) {
            prop_assert_eq!(x.key(free, a.set, &want), y.key(free, b.set, &want));
            prop_assert_eq!(a.why.bottleneck_mb_s, b.why.bottleneck_mb_s);
        }
    }

    /// Each subset packs as many good pairs as a search finds.
    #[test]
    fn packs_are_exact(t in any_box()) {
        let tables = Tables::new(&t).unwrap();
        let n = t.gpus.len();
        let good: Vec<GpuSet> = GpuSet::first(n).subsets(2).filter(|s| tables.groups(*s, 2) == 1).collect();
        fn most(set: GpuSet, good: &[GpuSet]) -> u32 {
            good.iter().filter(|g| set.holds(**g)).map(|g| 1 + most(set.without(*g), good)).max().unwrap_or(0)
        }
        for set in (0..1 << n).map(GpuSet) {
            prop_assert_eq!(tables.groups(set, 2), most(set, &good));
        }
    }
}
