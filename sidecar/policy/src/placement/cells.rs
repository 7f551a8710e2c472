//! Choice between nodes: buddy cells over the switch tree.

use super::{Choice, GpuSet, NoPlace, Tables, Want};
use pliant_model::topology::Switches;
use pliant_model::{GpuCount, NodeName};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

/// How far a job may be spread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// One node.
    Node,
    /// The nodes of one leaf switch or block.
    Leaf,
    /// Anywhere, as narrow as can be.
    #[default]
    Any,
}

/// What a job wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// GPUs in all.
    pub gpus: GpuCount,
    /// On exactly so many nodes, each with the same share; `None`: on as few as can be, in any shares.
    pub nodes: Option<u32>,
    /// Model, where one is named.
    pub model: Option<String>,
    /// How far it may be spread.
    pub scope: Scope,
    /// Whether it has fewer CPUs than GPUs on a node; see [`Want::near`].
    pub near: bool,
}

/// Nodes and their GPUs for a job, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Node (position as given to [`Cells::new`]) and its choice.
    pub nodes: Vec<(usize, Choice)>,
    /// The smallest cell that holds them all; `None`: one node.
    pub cell: Option<String>,
    /// Levels of switches between them: 0 one node, 1 one leaf, and so on.
    pub level: usize,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpus: u32 = self.nodes.iter().map(|(_, c)| c.set.len()).sum();
        match (&self.cell, self.nodes.first()) {
            (None, Some((_, choice))) => write!(f, "one node: {}", choice.why),
            (cell, _) => write!(
                f,
                "{gpus} GPUs on {} nodes, {} level(s) of switches, in {}",
                self.nodes.len(),
                self.level,
                cell.as_deref().unwrap_or("no cell")
            ),
        }
    }
}

#[derive(Clone, Debug)]
struct NodeState {
    shape: usize,
    free: GpuSet,
    /// The cell that it is directly in.
    leaf: usize,
}

#[derive(Clone, Debug)]
struct Cell {
    name: String,
    parent: Option<usize>,
    /// Levels below and including it: a leaf has 1.
    height: usize,
    /// All nodes below.
    nodes: Vec<usize>,
    /// Free GPUs below.
    free: GpuCount,
    /// Nodes below by shape and by how many GPUs are free.
    by_free: Vec<Vec<u32>>,
}

impl Cell {
    fn whole(&self, shape: usize, gpus: usize) -> u32 {
        self.by_free.get(shape).and_then(|h| h.get(gpus)).copied().unwrap_or(0)
    }

    fn at_least(&self, shape: usize, gpus: usize) -> u32 {
        self.by_free.get(shape).map_or(0, |h| h.iter().skip(gpus).sum())
    }

    fn free_of(&self, shape: usize) -> u64 {
        let h = self.by_free.get(shape).into_iter().flatten();
        h.enumerate().map(|(free, nodes)| u64::try_from(free).unwrap_or(0) * u64::from(*nodes)).sum()
    }
}

/// Nodes, and how many GPUs of each.
type Parts = Vec<(usize, GpuCount)>;
/// Height, whether nodes are not whole, free GPUs and position of a cell: the least is the best.
type CellKey = (usize, bool, GpuCount, usize);
/// A way to take GPUs of one shape in a cell.
type Pick = fn(&Cells, &Cell, usize, &Request) -> Option<Parts>;

/// The ways that serve a request, and whether a node is left in pieces by them.
fn picks(request: &Request) -> &'static [(bool, Pick)] {
    match request.nodes {
        Some(n) if n > 1 => &[(false, Cells::each)],
        _ => &[(false, Cells::whole_nodes), (true, Cells::pieces)],
    }
}

/// The nodes of a cluster with what is free, in the cells of its switches.
#[derive(Clone, Debug)]
pub struct Cells {
    shapes: Vec<Tables>,
    nodes: Vec<NodeState>,
    /// The last is the whole cluster.
    cells: Vec<Cell>,
    /// Nodes by shape and free set: a cluster has many nodes and few different ones.
    alike: BTreeMap<(usize, GpuSet), BTreeSet<usize>>,
    /// Choices inside a node without a named model, by shape, free set, count and whether they are to be near.
    memo: HashMap<(usize, GpuSet, GpuCount, bool), Option<Choice>>,
}

impl Cells {
    /// Nodes are given with the position of their box in `shapes`; all their GPUs are free at first. Nodes that no
    /// switch has are in the cluster itself.
    pub fn new(switches: &Switches, shapes: Vec<Tables>, nodes: &[(NodeName, usize)]) -> Cells {
        let root = switches.switches.len();
        let index: HashMap<&str, usize> =
            switches.switches.iter().enumerate().map(|(i, s)| (s.name.as_str(), i)).collect();
        let mut parent: Vec<Option<usize>> = vec![Some(root); root];
        let mut leaf: HashMap<&NodeName, usize> = HashMap::new();
        for (i, s) in switches.switches.iter().enumerate() {
            leaf.extend(s.nodes.iter().map(|n| (n, i)));
            for child in s.children.iter().filter_map(|c| index.get(c.as_str())) {
                if let Some(p) = parent.get_mut(*child) {
                    *p = Some(i);
                }
            }
        }
        parent.push(None);
        let by_free: Vec<Vec<u32>> = shapes.iter().map(|t| vec![0; t.len() + 1]).collect();
        let name = |i: usize| switches.switches.get(i).map_or("the cluster", |s| &s.name).to_owned();
        let cell = |(i, parent): (usize, &Option<usize>)| Cell {
            name: name(i),
            parent: *parent,
            height: 1,
            nodes: vec![],
            free: 0,
            by_free: by_free.clone(),
        };
        let mut all = Cells {
            cells: parent.iter().enumerate().map(cell).collect(),
            shapes,
            nodes: vec![],
            alike: BTreeMap::new(),
            memo: HashMap::new(),
        };
        all.raise();
        for (i, (node, shape)) in nodes.iter().enumerate() {
            let leaf = leaf.get(node).copied().unwrap_or(root);
            all.nodes.push(NodeState { shape: *shape, free: GpuSet::default(), leaf });
            for cell in all.above(leaf) {
                if let Some(c) = all.cells.get_mut(cell) {
                    c.nodes.push(i);
                }
            }
            all.count(i, 1);
            let gpus = all.shapes.get(*shape).map_or(0, Tables::len);
            all.set_free(i, GpuSet::first(gpus));
        }
        all
    }

    /// Heights from the leaves up.
    fn raise(&mut self) {
        for start in 0..self.cells.len() {
            let path = self.above(start);
            for (steps, cell) in path.into_iter().enumerate() {
                if let Some(c) = self.cells.get_mut(cell) {
                    c.height = c.height.max(steps + 1);
                }
            }
        }
    }

    /// A cell and those above it; a circle ends where it closes.
    fn above(&self, cell: usize) -> Vec<usize> {
        let mut path = vec![cell];
        while let Some(up) = path.last().and_then(|c| self.cells.get(*c)).and_then(|c| c.parent) {
            if path.contains(&up) {
                break;
            }
            path.push(up);
        }
        path
    }

    /// Adds a node to (or takes it from) the counts of its cells.
    fn count(&mut self, node: usize, sign: i8) {
        let Some(NodeState { shape, free, leaf }) = self.nodes.get(node).cloned() else { return };
        let change = |n: u32, by: u32| if sign > 0 { n.saturating_add(by) } else { n.saturating_sub(by) };
        for cell in self.above(leaf) {
            let Some(c) = self.cells.get_mut(cell) else { continue };
            c.free = change(c.free, free.len());
            if let Some(h) = c.by_free.get_mut(shape).and_then(|h| h.get_mut(free.len() as usize)) {
                *h = change(*h, 1);
            }
        }
        let alike = self.alike.entry((shape, free)).or_default();
        if sign > 0 {
            alike.insert(node);
        } else {
            alike.remove(&node);
            if alike.is_empty() {
                self.alike.remove(&(shape, free));
            }
        }
    }

    /// What is free on a node now; lost GPUs are left out.
    pub fn set_free(&mut self, node: usize, free: GpuSet) {
        let working =
            self.nodes.get(node).and_then(|n| self.shapes.get(n.shape)).map(Tables::working).unwrap_or_default();
        let free = GpuSet(free.0 & working.0);
        self.count(node, -1);
        if let Some(n) = self.nodes.get_mut(node) {
            n.free = free;
        }
        self.count(node, 1);
    }

    /// What is free on a node.
    pub fn free(&self, node: usize) -> GpuSet {
        self.nodes.get(node).map(|n| n.free).unwrap_or_default()
    }

    /// The best place for a job. Nothing is booked.
    ///
    /// # Errors
    /// Why there is none, with numbers.
    pub fn choose(&mut self, request: &Request) -> Result<Placement, NoPlace> {
        let free = self.cells.last().map_or(0, |c| c.free);
        if request.gpus == 0 || free < request.gpus {
            return Err(NoPlace::TooFew { want: request.gpus, free });
        }
        if request.nodes.is_none_or(|n| n == 1)
            && let Some((node, choice)) = self.one_node(request)
        {
            return Ok(Placement { nodes: vec![(node, choice)], cell: None, level: 0 });
        }
        let (most, within) = match request.scope {
            Scope::Node => (0, "on one node"),
            Scope::Leaf => (1, "at one leaf switch"),
            Scope::Any => (usize::MAX, "of one model"),
        };
        self.spread(request, most).ok_or(NoPlace::Apart { want: request.gpus, within, free })
    }

    /// A node for the whole job: the best ring, then the least broken, then the fullest node of the fullest leaf.
    fn one_node(&mut self, request: &Request) -> Option<(usize, Choice)> {
        type Key = (Reverse<u32>, u32, u32, Reverse<u32>, Reverse<(u32, u32, u32)>, bool, Reverse<GpuCount>);
        let mut best: Option<(Key, (usize, GpuSet), Choice)> = None;
        let mut memo = std::mem::take(&mut self.memo);
        for (shape, free) in self.alike.keys().filter(|(_, free)| free.len() >= request.gpus) {
            let want = Want { model: request.model.clone(), near: request.near, ..Want::gpus(request.gpus) };
            let tables = self.shapes.get(*shape)?;
            let choice = match request.model {
                None => *memo
                    .entry((*shape, *free, request.gpus, request.near))
                    .or_insert_with(|| tables.choose(*free, &want).ok()),
                Some(_) => tables.choose(*free, &want).ok(),
            };
            let Some(choice) = choice else { continue };
            let why = choice.why;
            let [pairs, quads, eights] = why.broken;
            let untouched = free.len() as usize == tables.len() && why.left > 0;
            let key = (
                Reverse(if request.near { why.numa_nodes } else { 0 }),
                why.bottleneck_mb_s,
                why.links,
                Reverse(why.numa_nodes),
                Reverse((eights, quads, pairs)),
                !untouched,
                Reverse(why.left),
            );
            if best.as_ref().is_none_or(|(k, ..)| key > *k) {
                best = Some((key, (*shape, *free), choice));
            }
        }
        self.memo = memo;
        let (_, alike, choice) = best?;
        let fullest = |n: &&usize| {
            let leaf = self.nodes.get(**n).map_or(0, |n| n.leaf);
            let free = |c: Option<usize>| c.and_then(|c| self.cells.get(c)).map_or(0, |c| c.free);
            (free(Some(leaf)), free(self.cells.get(leaf).and_then(|c| c.parent)), **n)
        };
        let node = *self.alike.get(&alike)?.iter().min_by_key(fullest)?;
        Some((node, choice))
    }

    /// Tries every cell for each shape: lowest first, whole nodes before pieces, then the fullest cell. One shape, so one
    /// model; a box of several models serves jobs of one node only.
    fn spread(&self, request: &Request, most: usize) -> Option<Placement> {
        let mut best: Option<(CellKey, Vec<(usize, Choice)>)> = None;
        let of_model = |t: &Tables| {
            t.single_model().is_some_and(|m| request.model.is_none() || *m == request.model) && !t.is_empty()
        };
        let shapes: Vec<usize> =
            self.shapes.iter().enumerate().filter(|(_, t)| of_model(t)).map(|(shape, _)| shape).collect();
        for (at, cell) in self.cells.iter().enumerate().filter(|(_, c)| c.height <= most && c.free >= request.gpus) {
            for (pieces, pick) in picks(request) {
                let key = (cell.height, *pieces, cell.free, at);
                if best.as_ref().is_some_and(|(k, _)| *k <= key) {
                    continue;
                }
                let placed = shapes.iter().find_map(|s| self.choices(&pick(self, cell, *s, request)?, request));
                if let Some(nodes) = placed {
                    best = Some((key, nodes));
                }
            }
        }
        let ((level, _, _, at), nodes) = best?;
        Some(Placement { nodes, cell: self.cells.get(at).map(|c| c.name.clone()), level })
    }

    /// The GPUs of each node; `None`: one of them cannot serve.
    fn choices(&self, parts: &Parts, request: &Request) -> Option<Vec<(usize, Choice)>> {
        let choice = |(node, gpus): &(usize, GpuCount)| {
            let state = self.nodes.get(*node)?;
            let want = Want { model: request.model.clone(), spans: true, near: request.near, ..Want::gpus(*gpus) };
            Some((*node, self.shapes.get(state.shape)?.choose(state.free, &want).ok()?))
        };
        parts.iter().map(choice).collect()
    }

    /// Whole nodes and at most one part of a node.
    fn whole_nodes(&self, cell: &Cell, shape: usize, request: &Request) -> Option<Parts> {
        let gpus = request.gpus;
        let size = self.shapes.get(shape)?.len();
        let per = GpuCount::try_from(size).ok().filter(|n| *n > 0)?;
        let (whole, part) = (gpus / per, gpus % per);
        if cell.whole(shape, size) < whole || (part > 0 && cell.at_least(shape, part as usize) <= whole) {
            return None;
        }
        let mut by_leaf: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for n in &cell.nodes {
            let state = self.nodes.get(*n)?;
            if state.shape == shape && state.free.len() == per {
                by_leaf.entry(state.leaf).or_default().push(*n);
            }
        }
        let mut chosen: Parts = vec![];
        let mut used = BTreeSet::new();
        while chosen.len() < whole as usize {
            let missing = whole as usize - chosen.len();
            let open = || by_leaf.iter().filter(|(leaf, _)| !used.contains(*leaf));
            // The leaf that fits best, or else the largest.
            let fits = open().filter(|(_, n)| n.len() >= missing).min_by_key(|(_, n)| n.len());
            let (leaf, nodes) = fits.or_else(|| open().max_by_key(|(leaf, n)| (n.len(), Reverse(**leaf))))?;
            chosen.extend(nodes.iter().take(missing).map(|n| (*n, per)));
            used.insert(*leaf);
        }
        if part > 0 {
            let state = |n: usize| self.nodes.get(n).filter(|s| s.shape == shape && s.free.len() >= part);
            let open = cell.nodes.iter().filter(|n| !chosen.iter().any(|(c, _)| c == *n));
            let key = |n: &usize| state(*n).map(|s| ((!used.contains(&s.leaf), s.free.len(), *n), *n));
            let (_, node) = open.filter_map(key).min()?;
            chosen.push((node, part));
        }
        Some(chosen)
    }

    /// The same share of so many nodes, the fullest first.
    fn each(&self, cell: &Cell, shape: usize, request: &Request) -> Option<Parts> {
        let count = request.nodes.filter(|n| *n > 0 && request.gpus.is_multiple_of(*n))?;
        let share = request.gpus / count;
        if cell.at_least(shape, share as usize) < count {
            return None;
        }
        let state = |n: &usize| self.nodes.get(*n).filter(|s| s.shape == shape && s.free.len() >= share);
        let mut nodes: Vec<(u32, usize)> = cell.nodes.iter().filter_map(|n| Some((state(n)?.free.len(), *n))).collect();
        nodes.sort_unstable();
        Some(nodes.into_iter().take(count as usize).map(|(_, n)| (n, share)).collect())
    }

    /// Parts of nodes, largest first: where too few nodes are whole.
    fn pieces(&self, cell: &Cell, shape: usize, request: &Request) -> Option<Parts> {
        let gpus = request.gpus;
        if cell.free_of(shape) < u64::from(gpus) {
            return None;
        }
        let state = |n: &usize| self.nodes.get(*n).filter(|s| s.shape == shape).map(|s| (s.free.len(), Reverse(*n)));
        let mut nodes: Vec<(u32, Reverse<usize>)> = cell.nodes.iter().filter_map(state).collect();
        nodes.sort_unstable_by(|a, b| b.cmp(a));
        let mut chosen = vec![];
        let mut missing = gpus;
        while missing > 0 {
            // The node that fits the rest best, or else the largest.
            let fits = nodes.iter().rposition(|(free, _)| *free >= missing);
            let (free, Reverse(node)) = nodes.remove(fits.unwrap_or(0));
            let take = free.min(missing);
            if take == 0 {
                return None;
            }
            chosen.push((node, take));
            missing -= take;
        }
        Some(chosen)
    }
}
