use super::super::event::{SeenJob, Sight};
use super::*;
use crate::bridge::JobRecord;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64 as Word, Ordering as Order};
use std::sync::Mutex;

/// A ring in memory, whole calls only.
#[derive(Debug, Default)]
struct Memory {
    next: AtomicU64,
    bytes: Mutex<Vec<u8>>,
}

impl Store for &Memory {
    fn claim(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let mut all = self.bytes.lock().unwrap();
        let at = usize::try_from(at).unwrap();
        if all.len() < at + bytes.len() {
            all.resize(at + bytes.len(), 0);
        }
        all[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let all = self.bytes.lock().unwrap();
        let at = usize::try_from(at).unwrap();
        bytes.copy_from_slice(all.get(at..at + bytes.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

fn ring(memory: &Memory, slots: u64) -> (RingWriter<&Memory>, RingReader<&Memory>) {
    // The space of the slots is there before the first record.
    memory.write(to_u64(HEADER) + slots * 64 - 1, &[0]).unwrap();
    let writer = RingWriter::over(memory, slots, 64, 7).unwrap();
    (writer, RingReader::over(memory).unwrap())
}

fn put<S: Store>(writer: &RingWriter<S>, payload: &[u8]) -> io::Result<()> {
    later(writer, payload)?;
    writer.flush()
}

fn later<S: Store>(writer: &RingWriter<S>, payload: &[u8]) -> io::Result<()> {
    writer.put(|slot| {
        slot.extend(payload);
        Ok(())
    })
}

#[test]
fn what_is_told_together_is_one_record_as_long_as_it_fits() {
    let memory = Memory::default();
    let (writer, mut reader) = ring(&memory, 4);
    later(&writer, &[1; 20]).unwrap();
    later(&writer, &[2; 20]).unwrap();
    assert_eq!(reader.take(), Read::Nothing);
    later(&writer, &[0; 41]).unwrap_err();
    put(&writer, &[3; 20]).unwrap();
    assert_eq!(reader.take(), Read::Record([[1; 20], [2; 20]].concat()));
    assert_eq!(reader.take(), Read::Record(vec![3; 20]));
    let memory = Memory::default();
    memory.write_zeros(to_u64(HEADER) + 4 * 2048 - 1);
    let writer = RingWriter::over(&memory, 4, 2048, 7).unwrap();
    let mut reader = RingReader::over(&memory).unwrap();
    writer.tell_with_next(5, &Event::NodeInit).unwrap();
    assert_eq!(reader.read(), Read::Nothing);
    writer.tell(6, &Event::Reconfigure).unwrap();
    assert_eq!(reader.read(), Read::Record(Record { ms: 5, event: Event::NodeInit }));
    assert_eq!(reader.read(), Read::Record(Record { ms: 6, event: Event::Reconfigure }));
    assert_eq!(reader.read(), Read::Nothing);
}

#[test]
fn records_come_in_order_and_losses_are_counted() {
    let memory = Memory::default();
    let (writer, mut reader) = ring(&memory, 4);
    assert_eq!(reader.take(), Read::Nothing);
    for n in 0..3u8 {
        put(&writer, &[n]).unwrap();
    }
    for n in 0..3u8 {
        assert_eq!(reader.take(), Read::Record(vec![n]));
    }
    for n in 3..10u8 {
        put(&writer, &[n]).unwrap();
    }
    // 7 written since, 4 slots: three are gone, and the rest comes in order.
    let (mut lost, mut seen) = (0, vec![]);
    loop {
        match reader.take() {
            Read::Gap(n) => lost += n,
            Read::Record(payload) => seen.extend(payload),
            Read::Nothing => break,
            Read::Anew => panic!("the same ring"),
        }
    }
    assert_eq!((lost, seen), (3, vec![6, 7, 8, 9]));
}

#[test]
fn a_reader_begins_behind_the_last_record_and_notices_a_new_ring() {
    let memory = Memory::default();
    let (writer, _) = ring(&memory, 4);
    put(&writer, b"old").unwrap();
    let mut reader = RingReader::over(&memory).unwrap();
    assert_eq!(reader.take(), Read::Nothing);
    put(&writer, b"new").unwrap();
    assert_eq!(reader.take(), Read::Record(b"new".to_vec()));
    RingWriter::over(&memory, 4, 64, 8).unwrap();
    assert_eq!(reader.take(), Read::Anew);
}

#[test]
fn a_slot_whose_writer_has_died_is_skipped_at_last() {
    let memory = Memory::default();
    let (writer, mut reader) = ring(&memory, 4);
    writer.store.claim();
    put(&writer, b"after").unwrap();
    let looks = (1..=PATIENCE).map(|_| reader.take()).collect::<Vec<_>>();
    assert_eq!(looks.last(), Some(&Read::Gap(1)));
    assert!(looks[..looks.len() - 1].iter().all(|l| *l == Read::Nothing));
    assert_eq!(reader.take(), Read::Record(b"after".to_vec()));
}

#[test]
fn a_sight_is_read_as_the_event_that_it_stands_for() {
    let memory = Memory::default();
    memory.write_zeros(to_u64(HEADER) + 4 * 2048 - 1);
    let writer = RingWriter::over(&memory, 4, 2048, 7).unwrap();
    let mut reader = RingReader::over(&memory).unwrap();
    let job =
        SeenJob { job_id: 9, user_id: 7, name: "a \"b\"", state: "PENDING", time_limit: Some(5), ..SeenJob::default() };
    writer.tell(5, &Sight { job, env: vec!["PLIANT_JOB_ELASTIC=8"] }).unwrap();
    let read = JobRecord {
        job_id: 9,
        user_id: 7,
        name: Some("a \"b\"".into()),
        state: "PENDING".into(),
        time_limit: Some(5),
        priority: Some(0),
        submit_time: Some(0),
        num_nodes: Some(0),
        num_cpus: Some(0),
        ..JobRecord::default()
    };
    let event = Event::Seen { job: Box::new(read), env: vec!["PLIANT_JOB_ELASTIC=8".into()] };
    assert_eq!(reader.read(), Read::Record(Record { ms: 5, event }));
}

#[test]
fn what_is_too_long_is_told_as_large() {
    let memory = Memory::default();
    let (writer, mut reader) = ring(&memory, 4);
    let event = Event::Start { job: 9, nodes: "n[0-999]".repeat(40), gpus: vec![], cpus: 1 };
    writer.tell(5, &event).unwrap();
    assert_eq!(reader.read(), Read::Record(Record { ms: 5, event: Event::Large { job: 9 } }));
}

#[test]
fn a_reader_that_comes_late_knows_how_it_began() {
    let memory = Memory::default();
    memory.write_zeros(64 * 200);
    let writer = RingWriter::over(&memory, 8, 1024, 7).unwrap();
    assert_eq!(RingReader::over(&memory).unwrap().beginning(), None);
    let init = |idle: Option<&str>| Event::Init { slurm: "22.05.8".into(), idle: idle.map(str::to_owned) };
    for event in [init(None), Event::NodeInit, init(Some("another layout")), Event::Reconfigure] {
        writer.tell(1, &event).unwrap();
    }
    let found = RingReader::over(&memory).unwrap().beginning();
    assert_eq!(found, Some(Record { ms: 1, event: init(Some("another layout")) }));
}

#[test]
fn a_file_that_is_no_ring_is_refused() {
    let memory = Memory::default();
    memory.write_all();
    assert_eq!(RingReader::over(&memory).unwrap_err().kind(), io::ErrorKind::InvalidData);
    let short = Memory::default();
    assert_eq!(RingReader::over(&short).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

impl Memory {
    fn write_zeros(&self, to: u64) {
        (&self).write(to, &[0]).unwrap();
    }

    fn write_all(&self) {
        (&self).write(0, &[7; 4096]).unwrap();
    }
}

/// Words that are read and written one by one, in any order that the memory model allows.
#[derive(Debug)]
struct Words {
    next: Word,
    words: Vec<Word>,
}

impl Store for Arc<Words> {
    fn claim(&self) -> u64 {
        self.next.fetch_add(1, Order::Relaxed)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let first = usize::try_from(at).unwrap() / 8;
        for (word, chunk) in self.words[first..].iter().zip(bytes.chunks(8)) {
            let mut whole = [0; 8];
            whole[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(whole), Order::Relaxed);
        }
        Ok(())
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let first = usize::try_from(at).unwrap() / 8;
        for (word, chunk) in self.words[first..].iter().zip(bytes.chunks_mut(8)) {
            chunk.copy_from_slice(&word.load(Order::Relaxed).to_le_bytes()[..chunk.len()]);
        }
        Ok(())
    }
}

/// A writer that overwrites its only slot, and a reader that looks meanwhile: whatever the order in which words become
/// visible, the reader sees whole records only.
#[test]
fn model_a_reader_never_sees_a_mixture() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let words = HEADER / 8 + 4;
        let store = Arc::new(Words { next: Word::new(1), words: (0..words).map(|_| Word::new(0)).collect() });
        let writer = RingWriter::over(Arc::clone(&store), 1, 32, 3).unwrap();
        let reader = RingReader::over(Arc::clone(&store)).unwrap();
        let thread = loom::thread::spawn(move || {
            put(&writer, &[1; 8]).unwrap();
            put(&writer, &[2; 8]).unwrap();
        });
        if let Some((number, payload)) = reader.slot(1) {
            let right = (number, payload.as_slice()) == (1, [1; 8].as_slice())
                || (number, payload.as_slice()) == (2, [2; 8].as_slice());
            assert!(right, "a mixture: {number} {payload:?}");
        }
        thread.join().unwrap();
        assert_eq!(reader.slot(1), Some((2, vec![2; 8])), "after the writer has ended, its last record is there");
    });
}
