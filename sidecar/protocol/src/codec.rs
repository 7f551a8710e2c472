//! Frames: a length of four bytes, big endian, and so many bytes of payload.
//!
//! Sans-I/O: [`Decoder`] takes bytes as they come; [`read_frame`] and [`write_frame`] serve blocking streams.

use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};

/// The largest payload on sockets that other users can reach, in bytes.
pub const MAX_FRAME: usize = 1 << 20;

/// The largest payload between pliantd and its own bridge (whole job tables), in bytes.
pub const MAX_BRIDGE_FRAME: usize = 256 << 20;

/// Why bytes are no frame.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// Length 0 or above the limit.
    #[error("a frame of {length} bytes; 1 to {max} are allowed")]
    Length {
        /// As announced.
        length: u64,
        /// The limit.
        max: usize,
    },
    /// The payload is no message of the expected set.
    #[error("not a valid message: {0}")]
    Json(#[from] serde_json::Error),
    /// The stream failed, or ended inside a frame.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Encodes one message as a frame.
///
/// # Errors
/// When the message cannot be JSON, or its length does not fit four bytes.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, CodecError> {
    frame(&serde_json::to_vec(message)?)
}

/// Puts a length before a payload.
///
/// # Errors
/// When the length does not fit four bytes.
pub fn frame(payload: &[u8]) -> Result<Vec<u8>, CodecError> {
    let length = u32::try_from(payload.len())
        .map_err(|_| CodecError::Length { length: payload.len() as u64, max: MAX_BRIDGE_FRAME })?;
    let mut out = Vec::with_capacity(payload.len() + 4);
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(payload);
    Ok(out)
}

/// Decodes the payload of a frame.
///
/// # Errors
/// When it is no message of the set.
pub fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, CodecError> {
    Ok(serde_json::from_slice(payload)?)
}

/// Cuts a stream of bytes into payloads; holds at most one frame and what was fed last.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    max: usize,
}

impl Decoder {
    /// A decoder that refuses payloads above `max` bytes.
    pub fn new(max: usize) -> Self {
        Decoder { buffer: vec![], start: 0, max }
    }

    /// Takes bytes as they came.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole payload; `None`: more bytes are needed.
    ///
    /// # Errors
    /// A length of 0 or above the limit: the stream is of no use any more.
    pub fn next_frame(&mut self) -> Result<Option<Vec<u8>>, CodecError> {
        let rest = self.buffer.get(self.start..).unwrap_or_default();
        let Some((head, body)) = rest.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*head);
        let size = checked(length, self.max)?;
        let Some(payload) = body.get(..size) else {
            return Ok(None);
        };
        let payload = payload.to_vec();
        self.start += 4 + size;
        Ok(Some(payload))
    }
}

fn checked(length: u32, max: usize) -> Result<usize, CodecError> {
    let size = usize::try_from(length).unwrap_or(usize::MAX);
    if size == 0 || size > max {
        return Err(CodecError::Length { length: u64::from(length), max });
    }
    Ok(size)
}

/// Writes one message and flushes.
///
/// # Errors
/// As [`encode`], or when the stream fails.
pub fn write_frame<T: Serialize>(to: &mut impl Write, message: &T) -> Result<(), CodecError> {
    to.write_all(&encode(message)?)?;
    Ok(to.flush()?)
}

/// Reads one payload; `None` at a clean end of the stream.
///
/// # Errors
/// When the stream fails or ends inside a frame, or the length is not allowed.
pub fn read_payload(from: &mut impl Read, max: usize) -> Result<Option<Vec<u8>>, CodecError> {
    let mut head = [0u8; 4];
    let mut got = 0;
    while got < head.len() {
        match from.read(head.get_mut(got..).unwrap_or_default()) {
            Ok(0) if got == 0 => return Ok(None),
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(n) => got += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
    let mut payload = vec![0; checked(u32::from_be_bytes(head), max)?];
    from.read_exact(&mut payload)?;
    Ok(Some(payload))
}

/// Reads one message; `None` at a clean end of the stream.
///
/// # Errors
/// As [`read_payload`], or when the payload is no message of the set.
pub fn read_frame<T: DeserializeOwned>(from: &mut impl Read, max: usize) -> Result<Option<T>, CodecError> {
    read_payload(from, max)?.map(|p| decode(&p)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_are_bounded() {
        for length in [0u32, 11, u32::MAX] {
            let mut d = Decoder::new(10);
            d.feed(&length.to_be_bytes());
            assert!(matches!(d.next_frame(), Err(CodecError::Length { .. })));
            assert!(read_payload(&mut length.to_be_bytes().as_slice(), 10).is_err());
        }
    }

    #[test]
    fn a_stream_that_ends_inside_a_frame_is_an_error() {
        let bytes = encode(&"hello").unwrap();
        assert!(read_frame::<String>(&mut &bytes[..0], 100).unwrap().is_none());
        for cut in 1..bytes.len() {
            assert!(read_frame::<String>(&mut &bytes[..cut], 100).is_err(), "{cut}");
        }
        assert_eq!(read_frame::<String>(&mut bytes.as_slice(), 100).unwrap().as_deref(), Some("hello"));
    }

    proptest! {
        #[test]
        fn cutting_does_not_matter(words in proptest::collection::vec("[a-z]{0,20}", 0..6), cut in 1usize..9) {
            let bytes: Vec<u8> = words.iter().flat_map(|w| encode(w).unwrap()).collect();
            let (mut d, mut out) = (Decoder::new(100), vec![]);
            for part in bytes.chunks(cut) {
                d.feed(part);
                while let Some(p) = d.next_frame().unwrap() {
                    out.push(decode::<String>(&p).unwrap());
                }
            }
            prop_assert_eq!(out, words);
        }
    }
}
