use super::*;
use proptest::prelude::*;

fn class() -> Class {
    let any = String::new;
    Class {
        partition: any(),
        features: any(),
        kind: any(),
        uid: None,
        min_nodes: 1,
        max_nodes: 0,
        in_all: false,
        gpus: 2,
    }
}

fn board() -> Board {
    let plan = |key, hard, places| Plan { key, hard, until_ms: 9_000, places };
    Board {
        nodes: vec!["n0".into(), "n1".into()],
        plans: vec![
            plan(Key::Job(7), true, vec![vec![(0, 0b1001), (1, 0b11)]]),
            plan(Key::Class(Class { partition: "gpu".into(), ..class() }), false, vec![vec![(1, 3)], vec![(0, 3)]]),
            plan(Key::Job(3), false, vec![]),
        ],
    }
}

struct Files {
    dir: tempfile::TempDir,
    file: File,
}

impl Files {
    fn new() -> Files {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = File::create(dir.path().join("board")).unwrap();
        Files { dir, file }
    }

    fn reader(&self) -> BoardReader {
        let owner = self.file.metadata().unwrap().uid();
        BoardReader::new(Trusted { path: self.dir.path().join("board"), owner })
    }

    fn write(&self, generation: u64, board: &Board) {
        write(&self.file, generation, 1_000, 5_000, &board.encode()).unwrap();
    }
}

fn signature() -> Signature<'static> {
    Signature {
        partition: "gpu",
        features: "",
        kind: "",
        uid: 5,
        min_nodes: 1,
        max_nodes: 1,
        shape: Shape::PerNode,
        gpus: 2,
    }
}

#[test]
fn a_board_reads_back() {
    let files = Files::new();
    files.write(1, &board());
    let mut reader = files.reader();
    assert!(reader.refresh(2_000));
    let plan = reader.job(7).unwrap();
    assert!(plan.hard && plan.until_ms == 9_000);
    let places: Vec<Vec<_>> = plan.places().map(|p| p.parts().collect()).collect();
    assert_eq!(places, [[(0, 0b1001), (1, 0b11)]]);
    assert_eq!((reader.node(0), reader.node(1), reader.node(2)), (Some("n0"), Some("n1"), None));
    assert_eq!(reader.job(3).unwrap().places().count(), 0);
    assert!(reader.job(4).is_none() && reader.job(8).is_none());
    assert_eq!(reader.class(&signature()).unwrap().places().count(), 2);
    assert!(reader.class(&Signature { partition: "low", ..signature() }).is_none());
}

#[test]
fn classes_tell_requests_apart() {
    let s = signature();
    assert!(class().holds(&s));
    for other in [
        Signature { gpus: 1, ..s },
        Signature { features: "nvl", ..s },
        Signature { kind: "a100", ..s },
        Signature { min_nodes: 2, max_nodes: 2, ..s },
        Signature { shape: Shape::PerTask, ..s },
        Signature { shape: Shape::PerJob, max_nodes: 4, ..s },
    ] {
        assert!(!class().holds(&other), "{other:?}");
    }
    assert!(class().holds(&Signature { shape: Shape::PerJob, ..s }), "on one node it is the same");
    assert!(!Class { uid: Some(4), ..class() }.holds(&s));
}

#[test]
fn an_expired_board_and_one_of_the_future_are_none() {
    let files = Files::new();
    files.write(1, &board());
    let mut reader = files.reader();
    assert!(reader.refresh(4_999));
    assert!(!reader.refresh(5_000));
    write(&files.file, 2, 9_000_000, 9_100_000, &board().encode()).unwrap();
    assert!(!files.reader().refresh(10_000), "a clock that was set back makes no plan eternal");
}

#[test]
fn a_torn_write_leaves_the_copy_and_a_truncated_file_none() {
    let files = Files::new();
    files.write(1, &board());
    let mut reader = files.reader();
    assert!(reader.refresh(2_000));
    // A writer that died between body and header, and one that died within the body of the next.
    let other = Board { nodes: vec!["x".into()], plans: vec![] };
    files.file.write_all_at(&other.encode(), 64).unwrap();
    assert!(reader.refresh(2_000) && reader.job(7).is_some(), "the copy counts");
    assert!(!files.reader().refresh(2_000), "a new reader sees none");
    files.file.set_len(70).unwrap();
    assert!(reader.refresh(2_000) && reader.job(7).is_some());
    assert!(!files.reader().refresh(2_000));
    files.file.set_len(0).unwrap();
    assert!(!reader.refresh(6_000));
}

#[test]
fn a_board_of_a_gibibyte_is_not_read() {
    let files = Files::new();
    let header = Header { length: 1 << 30, ..Header::of(1, 1_000, 5_000, b"") };
    files.file.write_all_at(&header.encode(), 0).unwrap();
    files.file.set_len(1 << 30).unwrap();
    assert!(!files.reader().refresh(2_000));
    // A small board in a huge file is one like any other.
    files.write(2, &board());
    assert!(files.reader().refresh(2_000));
}

#[test]
fn a_file_that_was_replaced_is_found() {
    let files = Files::new();
    files.write(1, &board());
    let mut reader = files.reader();
    assert!(reader.refresh(2_000));
    let path = files.dir.path().join("board");
    std::fs::remove_file(&path).unwrap();
    assert!(reader.refresh(3_000), "what was promised counts until it expires");
    let next = File::create(&path).unwrap();
    write(&next, 1, 5_500, 9_000, &Board::default().encode()).unwrap();
    assert!(reader.refresh(6_000) && reader.job(7).is_none());
}

#[test]
fn a_foreign_file_is_complained_of_once() {
    use std::os::unix::fs::PermissionsExt as _;
    let files = Files::new();
    files.write(1, &board());
    let path = files.dir.path().join("board");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o646)).unwrap();
    let mut reader = files.reader();
    assert!(!reader.refresh(2_000));
    assert!(reader.complaint().unwrap().contains("lets others write"));
    assert!(reader.complaint().is_none());
}

proptest! {
    /// Whatever bytes a body has, behind a right header: nothing panics, nothing is read beyond it.
    #[test]
    fn any_body_is_survived(body in proptest::collection::vec(any::<u8>(), 0..300), id: u32, index: u32) {
        let files = Files::new();
        write(&files.file, 1, 1_000, 5_000, &body).unwrap();
        let mut reader = files.reader();
        prop_assert!(reader.refresh(2_000));
        let of = |p: Option<PlanRef<'_>>| p.map_or(0, |p| p.places().map(|p| p.parts().count()).sum::<usize>());
        prop_assert!(of(reader.job(id)) + of(reader.class(&signature())) <= 300);
        let _ = reader.node(index);
    }

    /// A changed bit anywhere is noticed.
    #[test]
    fn any_changed_bit_is_noticed(byte in 0usize..64, bit in 0u8..8, in_body: bool) {
        let files = Files::new();
        files.write(1, &board());
        let at = if in_body { 64 + byte } else { byte };
        let mut bytes = std::fs::read(files.dir.path().join("board")).unwrap();
        bytes[at] ^= 1 << bit;
        std::fs::write(files.dir.path().join("board"), bytes).unwrap();
        prop_assert!(!files.reader().refresh(2_000));
    }
}
