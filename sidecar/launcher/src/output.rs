//! What the ranks print, to our own stdout and stderr: exactly as it came, or with `[rank] ` before each line.

use std::collections::BTreeMap;
use std::io::{self, Write};

/// A line without an end is shown at this length.
const LONG: usize = 8 << 10;

/// Where output goes.
#[derive(Debug)]
pub struct Output<O, E> {
    label: bool,
    out: O,
    err: E,
    partial: BTreeMap<(u8, u32), Vec<u8>>,
}

impl<O: Write, E: Write> Output<O, E> {
    /// Output to two streams.
    pub fn new(label: bool, out: O, err: E) -> Self {
        Output { label, out, err, partial: BTreeMap::new() }
    }

    /// Takes bytes of a rank; `stream` 2 is stderr, all else stdout.
    ///
    /// # Errors
    /// When the stream cannot be written.
    pub fn write(&mut self, stream: u8, rank: u32, bytes: &[u8]) -> io::Result<()> {
        if !self.label {
            return self.put(stream, &[bytes]);
        }
        let mut held = self.partial.remove(&(stream, rank)).unwrap_or_default();
        held.extend_from_slice(bytes);
        let mut ready = vec![];
        let prefix = format!("[{rank}] ");
        let mut rest = held.as_slice();
        while let Some(end) = rest.iter().position(|b| *b == b'\n') {
            let (line, tail) = rest.split_at(end + 1);
            ready.extend_from_slice(prefix.as_bytes());
            ready.extend_from_slice(line);
            rest = tail;
        }
        if rest.len() >= LONG {
            ready.extend_from_slice(prefix.as_bytes());
            ready.extend_from_slice(rest);
            ready.push(b'\n');
            rest = &[];
        }
        if !rest.is_empty() {
            self.partial.insert((stream, rank), rest.to_vec());
        }
        self.put(stream, &[&ready])
    }

    /// Shows lines that have no end yet.
    ///
    /// # Errors
    /// When a stream cannot be written.
    pub fn finish(&mut self) -> io::Result<()> {
        for ((stream, rank), line) in std::mem::take(&mut self.partial) {
            self.put(stream, &[format!("[{rank}] ").as_bytes(), &line, b"\n"])?;
        }
        Ok(())
    }

    fn put(&mut self, stream: u8, parts: &[&[u8]]) -> io::Result<()> {
        let to: &mut dyn Write = if stream == 2 { &mut self.err } else { &mut self.out };
        for part in parts {
            to.write_all(part)?;
        }
        to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_stand_at_the_beginning_of_lines() {
        let mut o = Output::new(true, vec![], vec![]);
        o.write(1, 0, b"ab").unwrap();
        o.write(1, 1, b"x\ny").unwrap();
        o.write(1, 0, b"c\n\n").unwrap();
        o.write(2, 3, b"err").unwrap();
        o.finish().unwrap();
        assert_eq!(String::from_utf8(o.out).unwrap(), "[1] x\n[0] abc\n[0] \n[1] y\n");
        assert_eq!(String::from_utf8(o.err).unwrap(), "[3] err\n");
    }

    #[test]
    fn without_labels_bytes_are_as_they_came() {
        let mut o = Output::new(false, vec![], vec![]);
        o.write(1, 0, &[0, 255, b'\r']).unwrap();
        assert_eq!(o.out, [0, 255, b'\r']);
    }
}
