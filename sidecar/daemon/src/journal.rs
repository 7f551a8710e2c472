//! The journal: resizes and events in SQLite (WAL, synchronous=FULL), so that each arrow of a resize is durable
//! before it is acted on and again when it is observed.
//!
//! What is lost with it is history and the names of open orders: Slurm and the launchers hold the truth, and
//! pliantd rebuilds its view from them.

use pliant_model::resize::{Kind, State};
use pliant_model::{JobId, OrderId, Reason};
use pliant_protocol::admin::Event;
use pliant_protocol::job::{Millis, Order};
use rusqlite::{Connection, OptionalExtension, params};
use std::path::Path;

/// Version of the tables; a journal of a later version is refused.
const SCHEMA: i64 = 1;

/// Events kept; older ones are pruned at the start and every so often.
const MAX_EVENTS: i64 = 100_000;

/// Why the journal cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// SQLite's words.
    #[error("journal: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// A text in it that this version cannot read.
    #[error("journal: {0}")]
    Json(#[from] serde_json::Error),
    /// Written by a later version.
    #[error(
        "journal: written by a later version of pliantd (schema {found}, this one knows {SCHEMA}): install that version again, or move the file away (history is lost, jobs are not harmed)"
    )]
    Later {
        /// As found.
        found: i64,
    },
}

type Result<T> = std::result::Result<T, JournalError>;

/// A resize as it stands in the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resize {
    /// Name of the order.
    pub id: OrderId,
    /// The job.
    pub base: JobId,
    /// The launcher's instance that it was meant for.
    pub instance: String,
    /// Which way.
    pub kind: Kind,
    /// The last arrow passed.
    pub state: State,
    /// What was ordered; `None` for a resize that the launcher began itself.
    pub order: Option<Order>,
    /// The slices that come or go, as far as known.
    pub slices: Vec<JobId>,
    /// GPUs of the job before.
    pub before: u32,
    /// GPUs of the job after, as intended.
    pub after: u32,
    /// When it was decided.
    pub started_ms: Millis,
}

/// The open database.
#[derive(Debug)]
pub struct Journal {
    db: Connection,
    writes: u64,
}

impl Journal {
    /// Opens it; a file that is no journal any more (torn, overwritten) is moved aside and a new one begun: history is
    /// lost, no job is harmed. Gives the journal, and the place of the damaged one.
    ///
    /// # Errors
    /// As [`Journal::open`], for anything but damage.
    pub fn open_or_begin(path: &Path, now_ms: Millis) -> Result<(Journal, Option<std::path::PathBuf>)> {
        use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
        let damaged = |e: &JournalError| match e {
            JournalError::Sqlite(e) => matches!(e.sqlite_error_code(), Some(DatabaseCorrupt | NotADatabase)),
            JournalError::Json(_) => true,
            JournalError::Later { .. } => false,
        };
        let opened = Journal::open(path).and_then(|j| j.open_resizes().map(|_| j));
        match opened {
            Ok(journal) => Ok((journal, None)),
            Err(e) if damaged(&e) => {
                let aside = path.with_extension(format!("broken-{now_ms}"));
                let moved = std::fs::rename(path, &aside);
                for tail in ["-wal", "-shm"] {
                    let mut name = path.as_os_str().to_owned();
                    name.push(tail);
                    let _ = std::fs::remove_file(name);
                }
                moved.map_err(|_| e)?;
                Ok((Journal::open(path)?, Some(aside)))
            }
            Err(e) => Err(e),
        }
    }

    /// Opens or creates it.
    ///
    /// # Errors
    /// When SQLite cannot, or the file is of a later version.
    pub fn open(path: &Path) -> Result<Journal> {
        let db = Connection::open(path)?;
        db.pragma_update(None, "journal_mode", "WAL")?;
        db.pragma_update(None, "synchronous", "FULL")?;
        db.busy_timeout(std::time::Duration::from_secs(2))?;
        let found: i64 = db.pragma_query_value(None, "user_version", |r| r.get(0))?;
        if found > SCHEMA {
            return Err(JournalError::Later { found });
        }
        db.execute_batch(
            "CREATE TABLE IF NOT EXISTS resizes (
               id TEXT PRIMARY KEY, base INTEGER NOT NULL, instance TEXT NOT NULL, kind TEXT NOT NULL,
               state TEXT NOT NULL, wanted TEXT, slices TEXT NOT NULL, gpus_before INTEGER NOT NULL,
               gpus_after INTEGER NOT NULL, started_ms INTEGER NOT NULL, open INTEGER NOT NULL) STRICT;
             CREATE INDEX IF NOT EXISTS resizes_open ON resizes (open) WHERE open = 1;
             CREATE TABLE IF NOT EXISTS events (
               seq INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, job INTEGER NOT NULL, id TEXT, kind TEXT,
               state TEXT, gpus_before INTEGER, gpus_after INTEGER, reason TEXT NOT NULL) STRICT;
             CREATE INDEX IF NOT EXISTS events_job ON events (job, seq);",
        )?;
        db.pragma_update(None, "user_version", SCHEMA)?;
        let journal = Journal { db, writes: 0 };
        journal.prune()?;
        Ok(journal)
    }

    fn prune(&self) -> Result<()> {
        self.db.execute("DELETE FROM events WHERE seq <= (SELECT max(seq) FROM events) - ?1", [MAX_EVENTS])?;
        self.db.execute(
            "DELETE FROM resizes WHERE open = 0 AND id NOT IN (SELECT id FROM events WHERE id IS NOT NULL)",
            [],
        )?;
        Ok(())
    }

    /// Writes a resize as it now stands, with the event that led there, in one durable transaction.
    ///
    /// # Errors
    /// When it is not durable; the arrow must not be acted on then.
    pub fn record(&mut self, resize: &Resize, at_ms: Millis, reason: &Reason) -> Result<()> {
        let event = Event {
            at_ms,
            job: resize.base,
            order: Some(resize.id.clone()),
            kind: Some(resize.kind),
            state: Some(resize.state),
            gpus: Some((resize.before, resize.after)),
            reason: reason.clone(),
        };
        let tx = self.db.transaction()?;
        tx.execute(
            "INSERT INTO resizes VALUES (?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11)
             ON CONFLICT (id) DO UPDATE SET state = ?5, slices = ?7, gpus_after = ?9, open = ?11",
            params![
                resize.id.0,
                resize.base.0,
                resize.instance,
                json(&resize.kind)?,
                json(&resize.state)?,
                resize.order.as_ref().map(json).transpose()?,
                json(&resize.slices)?,
                resize.before,
                resize.after,
                signed(resize.started_ms),
                !resize.state.is_final(),
            ],
        )?;
        insert(&tx, &event)?;
        tx.commit()?;
        self.writes += 1;
        if self.writes.is_multiple_of(10_000) {
            self.prune()?;
        }
        Ok(())
    }

    /// Writes an event that belongs to no resize.
    ///
    /// # Errors
    /// When it is not durable.
    pub fn note(&mut self, job: JobId, at_ms: Millis, reason: &Reason) -> Result<()> {
        let event = Event { at_ms, job, order: None, kind: None, state: None, gpus: None, reason: reason.clone() };
        insert(&self.db, &event)
    }

    /// The resizes that have not ended, oldest first.
    ///
    /// # Errors
    /// When the journal cannot be read.
    pub fn open_resizes(&self) -> Result<Vec<Resize>> {
        let mut q = self.db.prepare(
            "SELECT id, base, instance, kind, state, wanted, slices, gpus_before, gpus_after, started_ms
             FROM resizes WHERE open = 1 ORDER BY started_ms",
        )?;
        let rows = q.query_map([], |r| {
            Ok((
                (r.get::<_, String>(0)?, r.get::<_, u32>(1)?, r.get::<_, String>(2)?, r.get::<_, String>(3)?),
                (r.get::<_, String>(4)?, r.get::<_, Option<String>>(5)?, r.get::<_, String>(6)?),
                (r.get::<_, u32>(7)?, r.get::<_, u32>(8)?, r.get::<_, i64>(9)?),
            ))
        })?;
        rows.map(|row| {
            let ((id, base, instance, kind), (state, order, slices), (before, after, started)) = row?;
            Ok(Resize {
                id: OrderId(id),
                base: JobId(base),
                instance,
                kind: serde_json::from_str(&kind)?,
                state: serde_json::from_str(&state)?,
                order: order.map(|o| serde_json::from_str(&o)).transpose()?,
                slices: serde_json::from_str(&slices)?,
                before,
                after,
                started_ms: started.unsigned_abs(),
            })
        })
        .collect()
    }

    /// The last `limit` events of a job, oldest first.
    ///
    /// # Errors
    /// When the journal cannot be read.
    pub fn history(&self, job: JobId, limit: u32) -> Result<Vec<Event>> {
        let mut q = self.db.prepare(
            "SELECT at_ms, job, id, kind, state, gpus_before, gpus_after, reason FROM events WHERE job = ?1
             ORDER BY seq DESC LIMIT ?2",
        )?;
        let rows = q.query_map(params![job.0, limit], |r| {
            Ok((
                (r.get::<_, i64>(0)?, r.get::<_, u32>(1)?, r.get::<_, Option<String>>(2)?),
                (r.get::<_, Option<String>>(3)?, r.get::<_, Option<String>>(4)?),
                (r.get::<_, Option<u32>>(5)?, r.get::<_, Option<u32>>(6)?, r.get::<_, String>(7)?),
            ))
        })?;
        let mut events = rows
            .map(|row| {
                let ((at, job, id), (kind, state), (before, after, reason)) = row?;
                Ok(Event {
                    at_ms: at.unsigned_abs(),
                    job: JobId(job),
                    order: id.map(OrderId),
                    kind: kind.map(|k| serde_json::from_str(&k)).transpose()?,
                    state: state.map(|s| serde_json::from_str(&s)).transpose()?,
                    gpus: before.zip(after),
                    reason: serde_json::from_str(&reason)?,
                })
            })
            .collect::<Result<Vec<Event>>>()?;
        events.reverse();
        Ok(events)
    }

    /// Whether a resize of that name has been recorded.
    ///
    /// # Errors
    /// When the journal cannot be read.
    pub fn knows(&self, id: &OrderId) -> Result<bool> {
        let mut q = self.db.prepare_cached("SELECT 1 FROM resizes WHERE id = ?1")?;
        Ok(q.query_row([&id.0], |_| Ok(())).optional()?.is_some())
    }

    /// Writes a value durably: does the disk take it?
    ///
    /// # Errors
    /// When it does not.
    pub fn probe(&mut self) -> Result<()> {
        let tx = self.db.transaction()?;
        tx.execute_batch(
            "CREATE TABLE IF NOT EXISTS probe (n INTEGER) STRICT; DELETE FROM probe; INSERT INTO probe VALUES (1);",
        )?;
        Ok(tx.commit()?)
    }
}

fn insert(db: &Connection, e: &Event) -> Result<()> {
    db.execute(
        "INSERT INTO events (at_ms, job, id, kind, state, gpus_before, gpus_after, reason)
         VALUES (?1,?2,?3,?4,?5,?6,?7,?8)",
        params![
            signed(e.at_ms),
            e.job.0,
            e.order.as_ref().map(|o| &o.0),
            e.kind.as_ref().map(json).transpose()?,
            e.state.as_ref().map(json).transpose()?,
            e.gpus.map(|g| g.0),
            e.gpus.map(|g| g.1),
            json(&e.reason)?,
        ],
    )?;
    Ok(())
}

fn json<T: serde::Serialize>(value: &T) -> Result<String> {
    Ok(serde_json::to_string(value)?)
}

fn signed(ms: Millis) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resize(id: &str, state: State) -> Resize {
        Resize {
            id: OrderId(id.into()),
            base: JobId(7),
            instance: "i".into(),
            kind: Kind::Grow,
            state,
            order: None,
            slices: vec![JobId(8)],
            before: 2,
            after: 8,
            started_ms: 5,
        }
    }

    #[test]
    fn a_resize_survives_and_is_open_until_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.sqlite");
        let mut j = Journal::open(&path).unwrap();
        j.record(&resize("a", State::Proposed), 5, &Reason::NotReady).unwrap();
        j.record(&resize("a", State::Granted), 6, &Reason::NotReady).unwrap();
        j.record(&resize("b", State::Settled), 7, &Reason::Done { took: 1 }).unwrap();
        drop(j);
        let j = Journal::open(&path).unwrap();
        assert_eq!(j.open_resizes().unwrap(), [resize("a", State::Granted)]);
        let history = j.history(JobId(7), 2).unwrap();
        assert_eq!(history.iter().map(|e| e.state).collect::<Vec<_>>(), [Some(State::Granted), Some(State::Settled)]);
        assert!(j.knows(&OrderId("a".into())).unwrap() && !j.knows(&OrderId("c".into())).unwrap());
    }

    #[test]
    fn a_damaged_journal_is_moved_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.sqlite");
        let mut j = Journal::open(&path).unwrap();
        for n in 0..200 {
            j.record(&resize(&format!("{n}"), State::Settled), n, &Reason::NotReady).unwrap();
        }
        drop(j);
        let whole = std::fs::read(&path).unwrap();
        let zeroed: Vec<u8> = whole.iter().enumerate().map(|(i, b)| if i < 4096 { 0 } else { *b }).collect();
        for damage in [zeroed, b"not a database, but long enough to look at it twice".repeat(100), vec![]] {
            std::fs::write(&path, damage).unwrap();
            let (mut j, _aside) = Journal::open_or_begin(&path, 7).unwrap();
            j.record(&resize("new", State::Proposed), 5, &Reason::NotReady).unwrap();
        }
        assert!(path.with_extension("broken-7").exists());
    }

    #[test]
    fn a_later_journal_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.sqlite");
        drop(Journal::open(&path).unwrap());
        Connection::open(&path).unwrap().pragma_update(None, "user_version", 99).unwrap();
        assert!(matches!(Journal::open(&path), Err(JournalError::Later { found: 99 })));
    }
}
