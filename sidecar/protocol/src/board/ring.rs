//! The event ring: slurmctld writes, pliantd reads.
//!
//! A record has a number and goes into the slot `number % slots`, over whatever lies there: the writer never waits and
//! never looks at the reader. A slot is `number, length, sum, payload`, written in one call; the sum is seeded with the
//! number and the ring's epoch. A reader that comes too late, or in the middle of a write, sees a wrong sum or another
//! number, never a mixture. How many records it has missed follows from the numbers.

use super::bytes::{Sum, u32_at, u64_at};
use super::event::{Event, Line, Record, Told};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a slot.
pub const SLOT: usize = 2048;
/// Slots of a ring.
pub const SLOTS: u64 = 4096;
/// Bytes of the head of a slot.
const HEAD: usize = 24;
/// Bytes before the first slot.
const HEADER: usize = 64;
const MAGIC: u64 = u64::from_le_bytes(*b"PLIANTER");
const LAYOUT: u64 = 1;

/// Where a ring lies. A call may be seen in parts, in any order, by whoever reads meanwhile.
pub trait Store {
    /// Takes the next number.
    fn claim(&self) -> u64;
    /// Writes at an offset.
    ///
    /// # Errors
    /// The system's.
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()>;
    /// Reads at an offset.
    ///
    /// # Errors
    /// The system's; the end of the file is one.
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// A file, and the number of its next record.
#[derive(Debug)]
pub struct FileStore {
    file: File,
    next: AtomicU64,
}

impl Store for FileStore {
    fn claim(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, at)
    }
}

/// Size and identity of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    slots: u64,
    slot: usize,
    epoch: u64,
}

impl Layout {
    fn offset(&self, number: u64) -> u64 {
        to_u64(HEADER) + number % self.slots.max(1) * to_u64(self.slot)
    }

    fn sum(&self, number: u64, payload: &[u8]) -> u64 {
        let mut sum = Sum::new(self.epoch ^ number.rotate_left(32));
        sum.word(to_u64(payload.len()));
        sum.bytes(payload);
        sum.end()
    }

    fn header(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        let fields = [MAGIC, LAYOUT, self.slots, to_u64(self.slot), self.epoch];
        let mut sum = Sum::new(MAGIC);
        fields.iter().for_each(|f| sum.word(*f));
        for (place, field) in out.chunks_mut(8).zip(fields.iter().chain([&sum.end()])) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        out
    }

    fn of_header(bytes: &[u8; HEADER]) -> Option<Layout> {
        let field = |i: usize| u64_at(bytes, i * 8);
        let layout = Layout { slots: field(2)?, slot: usize::try_from(field(3)?).ok()?, epoch: field(4)? };
        let sane = (1..=1 << 20).contains(&layout.slots) && (HEAD..=1 << 16).contains(&layout.slot);
        (field(0)? == MAGIC && layout.header() == *bytes && sane).then_some(layout)
    }
}

fn to_u64(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

/// The writing end.
#[derive(Debug)]
pub struct RingWriter<S = FileStore> {
    store: S,
    layout: Layout,
    /// The record that is made, behind room for its head; empty: none. Its memory stays: none is asked for while
    /// slurmctld waits.
    ready: RefCell<Vec<u8>>,
}

impl RingWriter {
    /// Begins a ring in a file of its own. All of its space is written once, so that no later write has to find any.
    /// `epoch` tells it from the one before.
    ///
    /// # Errors
    /// The system's.
    pub fn begin(file: File, epoch: u64) -> io::Result<RingWriter> {
        let store = FileStore { file, next: AtomicU64::new(1) };
        let slots = vec![0; usize::try_from(RingWriter::size()).unwrap_or(0)];
        store.write(0, &slots)?;
        RingWriter::over(store, SLOTS, SLOT, epoch)
    }

    /// Bytes that the file must have.
    pub fn size() -> u64 {
        to_u64(HEADER) + SLOTS * to_u64(SLOT)
    }
}

impl<S: Store> RingWriter<S> {
    fn over(store: S, slots: u64, slot: usize, epoch: u64) -> io::Result<RingWriter<S>> {
        let layout = Layout { slots, slot, epoch };
        store.write(0, &layout.header())?;
        Ok(RingWriter { store, layout, ready: RefCell::new(Vec::with_capacity(2 * slot)) })
    }

    /// Adds to the record that is made; what no longer fits into its slot begins the next one.
    ///
    /// # Errors
    /// `InvalidInput` for what fits into none, or the system's.
    fn put(&self, payload: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> io::Result<()> {
        let mut ready = self.ready.borrow_mut();
        if ready.is_empty() {
            ready.resize(HEAD, 0);
        }
        let begin = ready.len();
        let made = payload(&mut ready);
        if made.is_err() || HEAD + (ready.len() - begin) > self.layout.slot {
            ready.truncate(begin);
            return made.and(Err(io::ErrorKind::InvalidInput.into()));
        }
        if ready.len() > self.layout.slot {
            let rest = ready.split_off(begin);
            drop(ready);
            self.flush()?;
            ready = self.ready.borrow_mut();
            ready.resize(HEAD, 0);
            ready.extend(rest);
        }
        Ok(())
    }

    /// Writes the record that is made.
    fn flush(&self) -> io::Result<()> {
        let mut slot = self.ready.borrow_mut();
        if slot.len() <= HEAD {
            return Ok(());
        }
        let number = self.store.claim();
        let payload = slot.get(HEAD..).unwrap_or_default();
        let head = [number, to_u64(payload.len()), self.layout.sum(number, payload)];
        for (place, field) in slot.chunks_mut(8).zip(head) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        let done = self.store.write(self.layout.offset(number), &slot);
        slot.clear();
        done
    }

    /// Tells an event of a time (Unix ms). One that is too long is told as [`Event::Large`], whose job is then asked for.
    ///
    /// # Errors
    /// The system's.
    pub fn tell(&self, ms: u64, event: &impl Told) -> io::Result<()> {
        self.tell_with_next(ms, event)?;
        self.flush()
    }

    /// Tells an event in one record with the next one, which comes at once: a call of the system less.
    ///
    /// # Errors
    /// As [`RingWriter::tell`].
    pub fn tell_with_next(&self, ms: u64, event: &impl Told) -> io::Result<()> {
        match self.put_json(ms, event) {
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                self.put_json(ms, &Event::Large { job: event.job().unwrap_or(0) })
            }
            done => done,
        }
    }

    fn put_json(&self, ms: u64, event: &impl Told) -> io::Result<()> {
        self.put(|slot| serde_json::to_writer(slot, &Line { ms, event }).map_err(io::Error::other))
    }
}

/// What a reader finds.
#[derive(Debug, PartialEq, Eq)]
pub enum Read<T> {
    /// The next record.
    Record(T),
    /// So many records are lost: written over, or not to be read.
    Gap(u64),
    /// Nothing new.
    Nothing,
    /// Another slurmctld has begun the ring anew: all is unknown.
    Anew,
}

/// The reading end.
#[derive(Debug)]
pub struct RingReader<S = FileStore> {
    store: S,
    layout: Layout,
    next: u64,
    /// Events of the last record that were not given out yet.
    rest: VecDeque<Record>,
    /// How often the next slot could not be read while a later one was there.
    stuck: u32,
}

/// Looks at a slot that is being written before it is given up: its writer has died in between.
const PATIENCE: u32 = 50;

impl RingReader {
    /// Opens a ring behind its last record.
    ///
    /// # Errors
    /// The system's, and `InvalidData` where it is no ring of this layout.
    pub fn open(file: File) -> io::Result<RingReader> {
        RingReader::over(FileStore { file, next: AtomicU64::new(0) })
    }
}

impl<S: Store> RingReader<S> {
    fn over(store: S) -> io::Result<RingReader<S>> {
        let layout = layout_of(&store)?;
        let mut reader = RingReader { store, layout, next: 1, rest: VecDeque::new(), stuck: 0 };
        let newest = (0..layout.slots).filter_map(|i| reader.number_in(i)).max();
        reader.next = newest.map_or(1, |n| n.saturating_add(1));
        Ok(reader)
    }

    /// The number in a slot, where the record in it is whole.
    fn number_in(&self, slot: u64) -> Option<u64> {
        self.slot(slot).map(|(number, _)| number)
    }

    fn slot(&self, number: u64) -> Option<(u64, Vec<u8>)> {
        let mut bytes = vec![0; self.layout.slot];
        self.store.read(self.layout.offset(number), &mut bytes).ok()?;
        let found = u64_at(&bytes, 0)?;
        let length = usize::try_from(u32_at(&bytes, 8)?).ok()?;
        let payload = bytes.get(HEAD..HEAD.checked_add(length)?)?;
        let whole = found > 0 && found % self.layout.slots == number % self.layout.slots;
        (whole && u64_at(&bytes, 16)? == self.layout.sum(found, payload)).then(|| (found, payload.to_vec()))
    }

    /// The next payload.
    fn take(&mut self) -> Read<Vec<u8>> {
        match self.slot(self.next) {
            Some((number, payload)) if number == self.next => {
                self.next += 1;
                self.stuck = 0;
                Read::Record(payload)
            }
            // Written over: the oldest that is still there comes next.
            Some((number, _)) if number > self.next => {
                let oldest = (number + 1).saturating_sub(self.layout.slots).max(self.next + 1);
                let lost = oldest - self.next;
                self.next = oldest;
                self.stuck = 0;
                Read::Gap(lost)
            }
            _ => self.behind(),
        }
    }

    /// The next slot has nothing new: either nothing was written, or its writer is at it, or the ring is another one.
    fn behind(&mut self) -> Read<Vec<u8>> {
        if layout_of(&self.store).is_ok_and(|now| now != self.layout) {
            return Read::Anew;
        }
        let later = self.number_in(self.next + 1).is_some_and(|n| n > self.next);
        self.stuck = if later { self.stuck + 1 } else { 0 };
        if self.stuck < PATIENCE {
            return Read::Nothing;
        }
        self.stuck = 0;
        self.next += 1;
        Read::Gap(1)
    }

    /// The last [`Event::Init`] that is still there: what a reader has to know that comes later than it.
    pub fn beginning(&self) -> Option<Record> {
        let inits = (0..self.layout.slots).filter_map(|i| self.slot(i)).filter(|(_, json)| is_init(json));
        let (_, json) = inits.max_by_key(|(number, _)| *number)?;
        serde_json::Deserializer::from_slice(&json).into_iter().next()?.ok()
    }

    /// The next event.
    pub fn read(&mut self) -> Read<Record> {
        if let Some(record) = self.rest.pop_front() {
            return Read::Record(record);
        }
        match self.take() {
            Read::Record(json) => {
                self.rest = serde_json::Deserializer::from_slice(&json).into_iter().map_while(Result::ok).collect();
                // A record of another version is a loss like any other.
                self.rest.pop_front().map_or(Read::Gap(1), Read::Record)
            }
            Read::Gap(n) => Read::Gap(n),
            Read::Nothing => Read::Nothing,
            Read::Anew => Read::Anew,
        }
    }
}

/// Whether a payload may be an [`Event::Init`], without reading all of it.
fn is_init(json: &[u8]) -> bool {
    json.windows(13).take(64).any(|w| w == b"\"is\":\"init\",\"")
}

fn layout_of(store: &impl Store) -> io::Result<Layout> {
    let mut header = [0; HEADER];
    store.read(0, &mut header)?;
    Layout::of_header(&header).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "is no event ring"))
}

#[cfg(test)]
mod tests;
