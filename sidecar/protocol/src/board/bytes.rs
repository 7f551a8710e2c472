//! Little-endian fields and the checksum of both boards.

/// Mixes words; a change of any bit changes the result. Not secret: it finds torn writes, not forgers (owner and mode do).
#[derive(Clone, Copy, Debug)]
pub struct Sum(u64);

impl Sum {
    /// With a seed, so that a record copied to another place does not pass.
    pub fn new(seed: u64) -> Sum {
        Sum(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    /// Takes one word.
    pub fn word(&mut self, word: u64) {
        // The finisher of SplitMix64: each input bit reaches each output bit.
        let mut x = self.0.rotate_left(5) ^ word;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.0 = x ^ (x >> 31);
    }

    /// Takes bytes, the last word filled with zeros.
    pub fn bytes(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            if let Some(part) = word.get_mut(..chunk.len()) {
                part.copy_from_slice(chunk);
            }
            self.word(u64::from_le_bytes(word));
        }
    }

    /// The result.
    pub fn end(self) -> u64 {
        self.0
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
