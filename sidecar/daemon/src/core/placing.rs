//! Plans for the select plugin: for the first pending jobs of the queue the nodes and GPUs that serve them best, and for
//! requests that are not known yet a list of places by class.

use super::gpus::{Hardware, Holders};
use crate::view::{self, SlurmView};
use pliant_model::cluster::GpuDemand;
use pliant_model::topology::{NodeTopology, Source, Switches};
use pliant_model::{Demand, GpuCount, JobId, NodeName, gres};
use pliant_policy::placement::{Cells, GpuSet, Request, Scope, Tables};
use pliant_protocol::board::{Board, Class, Key, Place, Plan};
use pliant_protocol::bridge::{JobRecord, NodeRecord};
use pliant_protocol::slurm_files::SlurmFiles;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Places that a class gets.
const PLACES: usize = 16;
/// Classes on a board, those of requests seen lately included.
const CLASSES: usize = 512;
/// Requests that are remembered.
const REMEMBERED: usize = 64;

/// What the controller's own files say.
#[derive(Debug, Default)]
pub struct Written {
    nodes: BTreeMap<NodeName, NodeTopology>,
    switches: Switches,
}

impl Written {
    /// From Slurm's files. What cannot be read is left out: plans then know less, and are no worse than Slurm's choice.
    pub fn of_files(files: &SlurmFiles) -> Written {
        let mut nodes = BTreeMap::new();
        if let (Ok(slurm), Ok(Some(conf))) = (&files.slurm, &files.gres) {
            for line in slurm.nodes.iter().filter(|l| l.gpus() > 0) {
                for name in line.names.iter().filter(|n| conf.auto_detect_of(n).is_none()) {
                    let devices = conf.merged(name, line.gres().unwrap_or_default());
                    nodes.insert(name.clone(), NodeTopology::of_gres(&devices, line.layout()));
                }
            }
        }
        let switches = files.switches.as_ref().ok().cloned().flatten().unwrap_or_default();
        Written { nodes, switches }
    }
}

/// A node with GPUs.
#[derive(Debug)]
struct Spot {
    name: NodeName,
    /// GRES index of the GPU at each position of its topology.
    indexes: Vec<Option<u32>>,
}

/// What a node offers besides GPUs.
#[derive(Clone, Copy, Debug, Default)]
struct Offer<'a> {
    cpus: u32,
    features: &'a str,
}

impl Offer<'_> {
    fn has(&self, cpus: u32, feature: Option<&str>) -> bool {
        self.cpus >= cpus && feature.is_none_or(|f| self.features.split(',').any(|own| own == f))
    }
}

/// The nodes of one partition.
#[derive(Debug)]
struct Part {
    cells: Cells,
    /// Position in [`Placer::spots`] of each node of the cells.
    members: Vec<usize>,
    /// The most GPUs of a node, and the GPU types.
    largest: GpuCount,
    kinds: BTreeSet<String>,
}

/// What decides whether all has to be built anew.
type Shape = Vec<(String, Option<String>, Vec<String>)>;

/// Makes boards; remembers what is the same from one to the next.
#[derive(Debug, Default)]
pub struct Placer {
    written: Written,
    shape: Shape,
    spots: Vec<Spot>,
    parts: BTreeMap<String, Part>,
    /// Classes of requests seen lately, newest last.
    requests: VecDeque<Class>,
    stale: bool,
}

/// What a board is made of.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// Slurm's answer, kept up to date by events.
    pub view: &'a SlurmView,
    /// Which job has which GPU.
    pub holders: &'a Holders,
    /// What the agents tell.
    pub hardware: &'a Hardware,
    /// Most jobs with a plan of their own.
    pub depth: usize,
}

impl Placer {
    /// Takes what the controller's files say.
    pub fn read(&mut self, written: Written) {
        self.written = written;
        self.stale = true;
    }

    /// The agents tell of other hardware.
    pub fn forget(&mut self) {
        self.stale = true;
    }

    /// A request was seen: jobs of its class are likely to come again.
    pub fn remember(&mut self, job: &JobRecord) {
        for class in classes_of(job) {
            self.requests.retain(|c| *c != class);
            self.requests.push_back(class);
        }
        while self.requests.len() > REMEMBERED {
            self.requests.pop_front();
        }
    }

    /// The plans of now.
    pub fn board(&mut self, seen: Seen<'_>) -> Board {
        self.build(seen);
        let free = self.free(seen);
        for part in self.parts.values_mut() {
            for (at, spot) in part.members.iter().enumerate() {
                part.cells.set_free(at, free.get(*spot).copied().unwrap_or_default());
            }
        }
        let offers = self.offers(seen.view);
        // Of all that is free: who comes first takes a place, and a job whose own is gone has those of its class.
        let classes = self.classes(&offers);
        let mut plans = vec![];
        for job in queue(seen.view).into_iter().take(seen.depth) {
            if let Some(place) = self.place(&offers, job) {
                self.book(&place);
                plans.push(plan(Key::Job(job.job_id), vec![self.to_board(&place)]));
            }
        }
        plans.extend(classes);
        Board { nodes: self.spots.iter().map(|s| s.name.0.clone()).collect(), plans }
    }

    fn build(&mut self, seen: Seen<'_>) {
        let gpus = |n: &&NodeRecord| n.gres.as_deref().map_or(0, gres::gpu_total) > 0;
        let parts = |n: &NodeRecord| seen.view.partitions.get(&NodeName(n.name.clone())).cloned().unwrap_or_default();
        let shape: Shape =
            seen.view.nodes.iter().filter(gpus).map(|n| (n.name.clone(), n.gres.clone(), parts(n))).collect();
        if !self.stale && shape == self.shape {
            return;
        }
        (self.stale, self.shape) = (false, shape);
        self.spots.clear();
        let (mut tables, mut known) = (vec![], BTreeMap::new());
        let mut of_spot = vec![];
        for (name, gres, parts) in &self.shape {
            let name = NodeName(name.clone());
            let topology = self.topology(&name, gres.as_deref().unwrap_or_default(), seen.hardware);
            let Some(at) = kind_of_box(&topology, &mut tables, &mut known) else { continue };
            let indexes = topology.gpus.iter().map(|g| g.gres_index).collect();
            of_spot.push((at, parts.clone(), kinds(gres.as_deref().unwrap_or_default()), topology.gpus.len()));
            self.spots.push(Spot { name, indexes });
        }
        let names: BTreeSet<&String> = of_spot.iter().flat_map(|(_, parts, ..)| parts).collect();
        self.parts = names.into_iter().map(|p| (p.clone(), self.part(p, &tables, &of_spot))).collect();
    }

    fn part(&self, name: &String, tables: &[Tables], of_spot: &[(usize, Vec<String>, Vec<String>, usize)]) -> Part {
        let in_it = || of_spot.iter().enumerate().filter(|(_, (_, parts, ..))| parts.contains(name));
        let members: Vec<usize> = in_it().map(|(spot, _)| spot).collect();
        let nodes: Vec<(NodeName, usize)> =
            in_it().filter_map(|(spot, (at, ..))| Some((self.spots.get(spot)?.name.clone(), *at))).collect();
        let largest = in_it().map(|(_, (.., n))| *n).max().unwrap_or(0);
        Part {
            cells: Cells::new(&self.written.switches, tables.to_vec(), &nodes),
            members,
            largest: GpuCount::try_from(largest).unwrap_or(0),
            kinds: in_it().flat_map(|(_, (_, _, kinds, _))| kinds.clone()).collect(),
        }
    }

    /// What lies inside a node: measured, written, or only counted. Types are Slurm's, since requests name those.
    fn topology(&self, name: &NodeName, gres: &str, hardware: &Hardware) -> NodeTopology {
        let measured = hardware.nodes.get(name).filter(|n| n.absent.is_none() && !n.gpus.is_empty());
        let mut topology = match (measured, self.written.nodes.get(name)) {
            (Some(gpus), _) => NodeTopology::of_agent(gpus),
            (None, Some(written)) => written.clone(),
            (None, None) => {
                let one = |i| pliant_model::topology::Gpu { gres_index: Some(i), ..Default::default() };
                NodeTopology::unlinked(Source::GresConf, (0..gres::gpu_total(gres).min(64)).map(one).collect())
            }
        };
        let types: Vec<Option<String>> = gres::gpus(gres)
            .into_iter()
            .flat_map(|g| std::iter::repeat_n(g.kind, usize::try_from(g.count.min(64)).unwrap_or(0)))
            .collect();
        for (position, gpu) in topology.gpus.iter_mut().enumerate() {
            if topology.source == Source::GresConf {
                gpu.gres_index = u32::try_from(position).ok();
            }
            let kind = gpu.gres_index.and_then(|i| types.get(usize::try_from(i).ok()?)?.clone());
            gpu.model = kind.or_else(|| gpu.model.take());
        }
        topology
    }

    /// Which GPUs of each spot no job has and nothing speaks against.
    fn free(&self, seen: Seen<'_>) -> Vec<GpuSet> {
        let records: BTreeMap<&str, &NodeRecord> = seen.view.nodes.iter().map(|n| (n.name.as_str(), n)).collect();
        let of = |spot: &Spot| {
            if records.get(spot.name.as_str()).is_none_or(|n| !view::takes_jobs(n)) {
                return GpuSet::default();
            }
            let gpus = seen.hardware.nodes.get(&spot.name);
            let good = |index: u32| {
                let gpu = gpus.and_then(|n| n.by_gres(index));
                let occupied = gpu.is_some_and(|g| seen.hardware.occupied(&spot.name, g).is_some());
                seen.holders.of(&spot.name, index).is_none() && !occupied
            };
            let positions = spot.indexes.iter().enumerate().filter(|(_, i)| i.is_some_and(good));
            GpuSet::of(positions.map(|(position, _)| position))
        };
        self.spots.iter().map(of).collect()
    }

    /// CPUs and features of each spot.
    fn offers<'a>(&self, view: &'a SlurmView) -> Vec<Offer<'a>> {
        let records: BTreeMap<&str, &NodeRecord> = view.nodes.iter().map(|n| (n.name.as_str(), n)).collect();
        let of = |spot: &Spot| {
            let record = records.get(spot.name.as_str())?;
            let cpus = record.cpus.saturating_sub(record.cpus_alloc.unwrap_or(0));
            Some(Offer { cpus, features: record.features.as_deref().unwrap_or_default() })
        };
        self.spots.iter().map(|s| of(s).unwrap_or_default()).collect()
    }

    /// The best place for a job, in spots.
    fn place(&mut self, offers: &[Offer<'_>], job: &JobRecord) -> Option<Vec<(usize, GpuSet)>> {
        let demand = view::demand(job);
        let request = request_of(&demand)?;
        let partitions = job.partition.as_deref().unwrap_or_default();
        partitions.split(',').find_map(|name| {
            let part = self.parts.get_mut(name)?;
            let per_node = demand.cpus.div_ceil(request.nodes.unwrap_or(1).max(1));
            let spots = &self.spots;
            let barred = |at: usize| {
                let (Some(spot), Some(offer)) = (spots.get(at), offers.get(at)) else { return true };
                let excluded = demand.excluded.contains(&spot.name);
                let demanded = demand.required.is_empty() || demand.required.contains(&spot.name);
                excluded || !demanded || !offer.has(per_node, demand.feature.as_deref())
            };
            let found = part.choose(&request, barred)?;
            let nodes = u32::try_from(found.len()).unwrap_or(u32::MAX);
            let fits = nodes >= demand.nodes_min && demand.nodes_max.is_none_or(|most| nodes <= most);
            fits.then_some(found)
        })
    }

    /// What is planned for one is not free for the next.
    fn book(&mut self, place: &[(usize, GpuSet)]) {
        for part in self.parts.values_mut() {
            for (spot, set) in place {
                if let Ok(at) = part.members.binary_search(spot) {
                    let left = part.cells.free(at).without(*set);
                    part.cells.set_free(at, left);
                }
            }
        }
    }

    fn to_board(&self, place: &[(usize, GpuSet)]) -> Place {
        let bits = |spot: usize, set: GpuSet| {
            let index = |position: usize| self.spots.get(spot)?.indexes.get(position).copied().flatten();
            set.iter().filter_map(index).filter(|i| *i < 64).fold(0u64, |bits, i| bits | 1 << i)
        };
        place.iter().map(|(spot, set)| (u32::try_from(*spot).unwrap_or(u32::MAX), bits(*spot, *set))).collect()
    }

    /// Places for requests that are not known yet: those seen lately, and the usual ones of each partition.
    fn classes(&mut self, offers: &[Offer<'_>]) -> Vec<Plan> {
        let mut wanted: Vec<Class> = self.requests.iter().rev().cloned().collect();
        for (name, part) in &self.parts {
            let kinds = std::iter::once(String::new()).chain(part.kinds.iter().cloned());
            for kind in kinds {
                for gpus in 1..=part.largest {
                    wanted.extend([false, true].map(|in_all| Class { gpus, in_all, ..plain(name, &kind) }));
                }
            }
        }
        let mut seen = BTreeSet::new();
        wanted.retain(|class| seen.insert(class.clone()));
        wanted.truncate(CLASSES);
        let mut known: BTreeMap<(String, String, String, u32, GpuCount), Vec<Place>> = BTreeMap::new();
        let mut plans = vec![];
        for class in wanted {
            let total = if class.in_all { class.gpus } else { class.gpus.saturating_mul(class.min_nodes) };
            let key = (class.partition.clone(), class.features.clone(), class.kind.clone(), class.min_nodes, total);
            let places = match known.get(&key) {
                Some(places) => places.clone(),
                None => {
                    let places = self.places(offers, &class, total);
                    known.insert(key, places.clone());
                    places
                }
            };
            if !places.is_empty() {
                plans.push(plan(Key::Class(class), places));
            }
        }
        plans
    }

    fn places(&mut self, offers: &[Offer<'_>], class: &Class, total: GpuCount) -> Vec<Place> {
        let nodes = (class.min_nodes > 1 || !class.in_all).then_some(class.min_nodes);
        let model = Some(class.kind.clone()).filter(|k| !k.is_empty());
        // How many CPUs such a job has is not known: most have few.
        let request = Request { gpus: total, nodes: nodes.or(Some(1)), model, scope: Scope::Any, near: true };
        let feature = Some(class.features.as_str()).filter(|f| !f.is_empty());
        let Some(part) = self.parts.get_mut(&class.partition) else { return vec![] };
        let (mut found, mut before) = (vec![], vec![]);
        while found.len() < PLACES {
            let barred = |spot: usize| offers.get(spot).is_none_or(|o| !o.has(1, feature));
            let Some(place) = part.choose(&request, barred) else { break };
            for (spot, set) in &place {
                if let Ok(at) = part.members.binary_search(spot) {
                    let free = part.cells.free(at);
                    before.push((at, free));
                    part.cells.set_free(at, free.without(*set));
                }
            }
            found.push(place);
        }
        for (at, free) in before.into_iter().rev() {
            part.cells.set_free(at, free);
        }
        found.iter().map(|place| self.to_board(place)).collect()
    }
}

impl Part {
    /// The best place on nodes that are not barred, in spots.
    fn choose(&mut self, request: &Request, barred: impl Fn(usize) -> bool) -> Option<Vec<(usize, GpuSet)>> {
        let out: Vec<(usize, GpuSet)> = self
            .members
            .iter()
            .enumerate()
            .filter(|(at, spot)| !self.cells.free(*at).is_empty() && barred(**spot))
            .map(|(at, _)| (at, self.cells.free(at)))
            .collect();
        out.iter().for_each(|(at, _)| self.cells.set_free(*at, GpuSet::default()));
        let found = self.cells.choose(request);
        out.iter().for_each(|(at, free)| self.cells.set_free(*at, *free));
        let nodes = found.ok()?.nodes;
        nodes.into_iter().map(|(at, choice)| Some((*self.members.get(at)?, choice.set))).collect()
    }
}

/// Tables are made once for each kind of box. `None`: a box that cannot be scored.
fn kind_of_box(
    topology: &NodeTopology,
    tables: &mut Vec<Tables>,
    known: &mut BTreeMap<String, Option<usize>>,
) -> Option<usize> {
    let mut plain = topology.clone();
    for gpu in &mut plain.gpus {
        (gpu.uuid, gpu.bus, gpu.clique) = (None, None, None);
        gpu.name.clear();
    }
    plain.warnings.clear();
    let key = serde_json::to_string(&plain).ok()?;
    *known.entry(key).or_insert_with(|| {
        tables.push(Tables::new(&plain).ok()?);
        Some(tables.len() - 1)
    })
}

fn plan(key: Key, places: Vec<Place>) -> Plan {
    // How long a plan counts is said by the board's own expiry.
    Plan { key, hard: false, until_ms: u64::MAX, places }
}

fn plain(partition: &str, kind: &str) -> Class {
    Class {
        partition: partition.to_owned(),
        features: String::new(),
        kind: kind.to_owned(),
        uid: None,
        min_nodes: 1,
        max_nodes: 0,
        in_all: false,
        gpus: 1,
    }
}

fn kinds(gres: &str) -> Vec<String> {
    gres::gpus(gres).into_iter().filter_map(|g| g.kind).collect()
}

/// Pending jobs that may start at any moment, in Slurm's order.
fn queue(view: &SlurmView) -> Vec<&JobRecord> {
    let tier = |j: &JobRecord| {
        let parts = j.partition.as_deref().unwrap_or_default().split(',');
        parts.filter_map(|p| view.tiers.get(p)).copied().max().unwrap_or(0)
    };
    let mut all: Vec<&JobRecord> = view.jobs.values().filter(|j| may_start(j)).collect();
    all.sort_by_key(|j| (std::cmp::Reverse((tier(j), j.priority.unwrap_or(0))), JobId(j.job_id)));
    all
}

fn may_start(job: &JobRecord) -> bool {
    let alone = job.het_job_id.is_none() && job.reservation.is_none() && !job.exclusive;
    // The tasks of an array that have not started share a record, and get their ids when they start: a class serves them.
    let one = job.array_tasks.is_none();
    let waits = matches!(job.reason.as_deref(), None | Some("None" | "Resources" | "Priority"));
    job.state == "PENDING" && job.priority != Some(0) && alone && one && waits && view::wants_gpus(job)
}

/// The same share on each of so many nodes, or all on one.
fn request_of(demand: &Demand) -> Option<Request> {
    let (gpus, nodes) = match demand.gpus {
        GpuDemand::PerNode(n) => (n.checked_mul(demand.nodes_min)?, Some(demand.nodes_min)),
        GpuDemand::Total(n) if demand.nodes_min > 1 => (n, (n % demand.nodes_min == 0).then_some(demand.nodes_min)),
        GpuDemand::Total(n) => (n, None),
    };
    // Slurm gives a job at least one CPU, and tells as many as it asks for.
    let near = demand.cpus < gpus;
    (gpus > 0).then(|| Request { gpus, nodes, model: demand.kind.clone(), scope: Scope::Any, near })
}

/// The classes that jobs like this one are of.
fn classes_of(job: &JobRecord) -> Vec<Class> {
    let demand = view::demand(job);
    let (gpus, in_all) = match demand.gpus {
        GpuDemand::PerNode(n) => (n, false),
        GpuDemand::Total(n) => (n, true),
    };
    let per_task = job.tres_per_task.is_some() || job.tres_per_socket.is_some();
    let plain_words = job.features.is_none() || demand.feature.is_some();
    if gpus == 0 || !plain_words || per_task || job.exclusive || job.het_job_id.is_some() || !demand.required.is_empty()
    {
        return vec![];
    }
    let partitions = job.partition.as_deref().unwrap_or_default();
    let class = |partition: &str| Class {
        features: job.features.clone().unwrap_or_default(),
        min_nodes: demand.nodes_min,
        in_all,
        gpus,
        ..plain(partition, demand.kind.as_deref().unwrap_or_default())
    };
    partitions.split(',').map(class).collect()
}

#[cfg(test)]
mod tests;
