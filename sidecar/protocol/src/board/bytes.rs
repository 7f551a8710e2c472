//! Little-endian fields and the checksum of both boards.

/// Mixes words; a change of any bit changes the result. Not secret: it finds torn writes, not forgers (owner and mode do).
///
/// Four lanes, so that a board of 100 kB costs microseconds: slurmctld waits for it.
#[derive(Clone, Copy, Debug)]
pub struct Sum {
    lanes: [u64; LANES],
    next: usize,
}

const LANES: usize = 4;

/// For a fixed word a permutation of the lane, and for a fixed lane one of the word: nothing that differs once is equal
/// again.
fn mix(lane: u64, word: u64) -> u64 {
    (lane.rotate_left(23) ^ word).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

impl Sum {
    /// With a seed, so that a record copied to another place does not pass.
    pub fn new(seed: u64) -> Sum {
        let lane = |n: u64| mix(seed ^ 0x9e37_79b9_7f4a_7c15, n);
        Sum { lanes: [lane(1), lane(2), lane(3), lane(4)], next: 0 }
    }

    /// Takes one word.
    pub fn word(&mut self, word: u64) {
        if let Some(lane) = self.lanes.get_mut(self.next) {
            *lane = mix(*lane, word);
        }
        self.next = (self.next + 1) % LANES;
    }

    /// Takes bytes, the last word filled with zeros.
    pub fn bytes(&mut self, bytes: &[u8]) {
        let mut blocks = bytes.chunks_exact(8 * LANES);
        if self.next == 0 {
            for block in &mut blocks {
                for (lane, word) in self.lanes.iter_mut().zip(block.chunks_exact(8)) {
                    *lane = mix(*lane, word.try_into().map_or(0, u64::from_le_bytes));
                }
            }
        }
        let rest = if self.next == 0 { blocks.remainder() } else { bytes };
        for chunk in rest.chunks(8) {
            let mut word = [0; 8];
            if let Some(part) = word.get_mut(..chunk.len()) {
                part.copy_from_slice(chunk);
            }
            self.word(u64::from_le_bytes(word));
        }
    }

    /// The result.
    pub fn end(self) -> u64 {
        let all = self.lanes.into_iter().fold(0x94d0_49bb_1331_11eb, mix);
        all ^ (all >> 31)
    }
}

/// A 32-bit field; `None`: beyond the end.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

/// A 64-bit field.
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// A text with its length in front, and where it ends.
pub fn text_at(bytes: &[u8], at: usize) -> Option<(&str, usize)> {
    let length = usize::try_from(u32_at(bytes, at)?).ok()?;
    let begin = at.checked_add(4)?;
    let end = begin.checked_add(length)?;
    Some((std::str::from_utf8(bytes.get(begin..end)?).ok()?, end))
}

/// Appends a text with its length; texts are bounded by the caller.
pub fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend(u32::try_from(text.len()).unwrap_or(0).to_le_bytes());
    out.extend(text.as_bytes());
}
