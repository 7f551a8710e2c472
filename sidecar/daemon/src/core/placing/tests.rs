use super::*;
use pliant_model::conf::gres_conf;

/// Two nodes of four GPUs, the linked pairs 0-3 and 1-2 across the sockets, with what jobs hold.
struct Site {
    view: SlurmView,
    placer: Placer,
    hardware: Hardware,
}

impl Site {
    fn new() -> Site {
        let links = ["-1,1,1,4", "1,-1,4,1", "1,4,-1,1", "4,1,1,-1"];
        let cores = ["0-31", "0-31", "32-63", "32-63"];
        let line = |i: usize| format!("Name=gpu File=/dev/nvidia{i} Cores={} Links={}\n", cores[i], links[i]);
        let text: String = (0..4).map(line).collect();
        let conf = gres_conf::parse("gres.conf", &text, &mut |_| Err("none".into())).unwrap();
        let layout = gres_conf::Layout { sockets: 2, cores: 32, threads: 1 };
        let names: Vec<NodeName> = vec!["n0".into(), "n1".into()];
        let topology = |n: &NodeName| (n.clone(), NodeTopology::of_gres(&conf.gpus(n), layout));
        let written = Written { nodes: names.iter().map(topology).collect(), switches: Switches::default() };
        let node = |n: &NodeName| NodeRecord {
            name: n.0.clone(),
            state: "IDLE".into(),
            cpus: 64,
            gres: Some("gpu:4".into()),
            ..NodeRecord::default()
        };
        let view = SlurmView {
            nodes: names.iter().map(node).collect(),
            partitions: names.iter().map(|n| (n.clone(), vec!["gpu".to_owned()])).collect(),
            ..SlurmView::default()
        };
        let mut placer = Placer::default();
        placer.read(written);
        Site { view, placer, hardware: Hardware::default() }
    }

    fn job(mut self, id: u32, change: impl FnOnce(&mut JobRecord)) -> Site {
        let mut job = JobRecord {
            job_id: id,
            state: "PENDING".into(),
            partition: Some("gpu".into()),
            priority: Some(1000 - id),
            num_nodes: Some(1),
            num_cpus: Some(1),
            tres_per_node: Some("gres:gpu:2".into()),
            ..JobRecord::default()
        };
        change(&mut job);
        self.view.jobs.insert(JobId(id), job);
        self
    }

    fn board(&mut self) -> Board {
        let holders = Holders::of_view(&self.view);
        self.placer.board(Seen { view: &self.view, holders: &holders, hardware: &self.hardware, depth: 100 })
    }

    fn of(&mut self, id: u32) -> Option<Place> {
        let found = self.board().plans.into_iter().find(|p| p.key == Key::Job(id))?;
        Some(found.places[0].clone())
    }
}

fn run(job: &mut JobRecord, nodes: &str, detail: &str) {
    job.state = "RUNNING".into();
    (job.nodes, job.gres_detail) = (Some(nodes.into()), vec![detail.into()]);
}

#[test]
fn a_job_with_cpus_for_its_gpus_gets_the_linked_pair_and_one_without_those_near_its_cpu() {
    let mut site = Site::new().job(1, |j| j.num_cpus = Some(2)).job(2, |_| ());
    assert_eq!(site.of(1), Some(vec![(0, 0b0110)]));
    assert_eq!(site.of(2), Some(vec![(1, 0b0011)]), "on n0 only GPUs of two sockets are left");
}

#[test]
fn plans_of_one_board_never_overlap_and_follow_the_queue() {
    let mut site = (1..=5).fold(Site::new(), |s, id| s.job(id, |j| j.num_cpus = Some(4)));
    let board = site.board();
    let mut taken: BTreeMap<u32, u64> = BTreeMap::new();
    for plan in board.plans.iter().filter(|p| matches!(p.key, Key::Job(_))) {
        for (node, gpus) in plan.places.iter().flatten() {
            let before = taken.entry(*node).or_default();
            assert_eq!(*before & gpus, 0, "{plan:?}");
            *before |= gpus;
        }
    }
    assert_eq!(taken, [(0, 0b1111), (1, 0b1111)].into());
    assert_eq!(site.of(5), None, "nothing is left for the last");
}

#[test]
fn what_jobs_hold_and_what_is_drained_is_not_planned() {
    let mut site = Site::new().job(1, |j| run(j, "n0", "gpu:2(IDX:1-2)")).job(2, |j| j.num_cpus = Some(2));
    assert_eq!(site.of(2), Some(vec![(0, 0b1001)]));
    site.view.nodes[0].flags = vec!["DRAIN".into()];
    assert_eq!(site.of(2), Some(vec![(1, 0b0110)]));
}

#[test]
fn several_nodes_get_equal_shares_and_wishes_of_the_user_hold() {
    let mut site = Site::new().job(1, |j| (j.num_nodes, j.num_cpus) = (Some(2), Some(8)));
    assert_eq!(site.of(1), Some(vec![(0, 0b0110), (1, 0b0110)]));
    let mut site = Site::new().job(1, |j| j.req_nodes = Some("n1".into()));
    assert_eq!(site.of(1).unwrap()[0].0, 1);
    let mut site = Site::new().job(1, |j| j.exc_nodes = Some("n0".into()));
    assert_eq!(site.of(1).unwrap()[0].0, 1);
    let mut site = Site::new().job(1, |j| j.num_cpus = Some(65));
    assert_eq!(site.of(1), None, "no node has so many CPUs");
    let mut site = Site::new().job(1, |j| (j.tres_per_node, j.tres_per_job) = (None, Some("gres:gpu:8".into())));
    assert_eq!(site.of(1), Some(vec![(0, 0b1111), (1, 0b1111)]));
}

#[test]
fn what_is_not_ours_to_place_gets_no_plan() {
    for change in [
        (|j: &mut JobRecord| j.exclusive = true) as fn(&mut JobRecord),
        |j| j.het_job_id = Some(1),
        |j| j.reservation = Some("maint".into()),
        |j| j.priority = Some(0),
        |j| j.reason = Some("Dependency".into()),
        |j| j.array_tasks = Some("1-9".into()),
        |j| j.tres_per_node = None,
        |j| j.partition = Some("other".into()),
    ] {
        assert_eq!(Site::new().job(1, change).of(1), None);
    }
}

#[test]
fn classes_have_places_in_order_for_the_usual_and_the_seen_requests() {
    let mut site = Site::new();
    let of = |board: &Board, class: &Class| {
        let found = board.plans.iter().find(|p| p.key == Key::Class(class.clone()));
        found.map(|p| p.places.clone())
    };
    let two = Class { gpus: 2, ..plain("gpu", "") };
    let board = site.board();
    assert_eq!(of(&board, &two).unwrap(), [[(0, 0b0011)], [(0, 0b1100)], [(1, 0b0011)], [(1, 0b1100)]]);
    let both = Class { min_nodes: 2, gpus: 4, ..plain("gpu", "") };
    assert_eq!(of(&board, &both), None);
    let job = JobRecord {
        partition: Some("gpu".into()),
        num_nodes: Some(2),
        tres_per_node: Some("gres:gpu:4".into()),
        ..JobRecord::default()
    };
    site.placer.remember(&job);
    assert_eq!(of(&site.board(), &both).unwrap(), [[(0, 0b1111), (1, 0b1111)]]);
}
