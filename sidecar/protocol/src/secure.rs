//! The authenticated session between agents and pliantd (feature `secure`). Sans-I/O.
//!
//! A Noise XX handshake with keys that are fresh for each connection; then, already encrypted, each side shows one
//! credential (MUNGE in practice) that carries its Noise public key, the purpose, both names and the handshake hash,
//! and that only the peer's uid can decode. The uid that made the credential must be the one that is expected. A
//! credential seen elsewhere is of no use: its handshake hash is that of another connection.
//!
//! ```text
//! initiator (agent)                                   responder (pliantd)
//!   frame 1: e, own name (clear)            ------->
//!                                           <-------  frame 2: e, ee, s, es, own name
//!   frame 3: s, se                          ------->
//!   frame 4: credential (encrypted)         ------->  checks it, and only then makes its own
//!   checks it                               <-------  frame 5: credential (encrypted)
//! ```
//! Every frame has [`codec`]'s length before it. Within the session each frame is one Noise message: one byte
//! (1: the message goes on in the next frame, 0: it ends here) and a part of the message. Noise counts the frames of
//! each direction, so that one that is repeated, missing or out of order cannot be decrypted. After any error the
//! connection is of no use and has to be closed.
//!
//! Making and decoding credentials may block for as long as munged wants: in tokio call [`Handshake::step`] within
//! `spawn_blocking`, with a timeout on it.
//!
//! ```
//! use pliant_protocol::codec::Decoder;
//! use pliant_protocol::secure::{Credentials, Handshake, MAX_SEALED, Party, Proof};
//!
//! # struct Toy(u32);
//! # impl Credentials for Toy {
//! #     fn encode(&mut self, payload: &[u8], only_for: u32) -> Result<String, String> {
//! #         let hex: String = payload.iter().map(|b| format!("{b:02x}")).collect();
//! #         Ok(format!("{}:{only_for}:{hex}", self.0))
//! #     }
//! #     fn decode(&mut self, credential: &str) -> Result<Proof, String> {
//! #         let mut words = credential.split(':');
//! #         let uid = words.next().unwrap().parse().unwrap();
//! #         let hex = words.nth(1).unwrap();
//! #         let payload = (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..][..2], 16).unwrap()).collect();
//! #         Ok(Proof { uid, payload })
//! #     }
//! # }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (root, pliant) = (0, 500);
//! # let (mut agents_munge, mut daemons_munge) = (Toy(root), Toy(pliant));
//! // The agent, which runs as root and talks to the account of pliantd only.
//! let mut agent = Handshake::initiator(Party { purpose: "agent".into(), me: "n1".into(), peer: None, peer_uid: pliant })?;
//! // pliantd, which accepts root only, and learns the node's name from the handshake.
//! let mut daemon = Handshake::responder(Party { purpose: "agent".into(), me: "ctl".into(), peer: None, peer_uid: root })?;
//!
//! // Both ends do the same: read frames, step, write what comes out, until done. Here the wires are two buffers.
//! let (mut to_daemon, mut to_agent) = (Decoder::new(MAX_SEALED), Decoder::new(MAX_SEALED));
//! to_daemon.feed(&agent.start()?); // only the initiator starts
//! while !(agent.is_done() && daemon.is_done()) {
//!     while let Some(frame) = to_daemon.next_frame()? {
//!         to_agent.feed(&daemon.step(&frame, &mut daemons_munge)?);
//!     }
//!     while let Some(frame) = to_agent.next_frame()? {
//!         to_daemon.feed(&agent.step(&frame, &mut agents_munge)?);
//!     }
//! }
//! let (agent, daemon) = (agent.into_session()?, daemon.into_session()?);
//! assert_eq!(daemon.peer(), "n1");
//!
//! // A session has two halves, for a reading and a writing task.
//! let (mut sealer, _) = agent.split();
//! let (_, mut opener) = daemon.split();
//! to_daemon.feed(&sealer.seal(b"{\"type\":\"pong\"}")?); // bytes for the wire, lengths included
//! while let Some(frame) = to_daemon.next_frame()? {
//!     if let Some(message) = opener.open(&frame)? {
//!         assert_eq!(message, b"{\"type\":\"pong\"}");
//!     }
//! }
//! # Ok(())
//! # }
//! ```

use crate::codec::{self, MAX_FRAME};
use snow::{Builder, HandshakeState, StatelessTransportState};
use std::sync::Arc;

/// The largest frame on the wire in bytes: one Noise message. Give it to [`codec::Decoder::new`].
pub const MAX_SEALED: usize = 65_535;

/// Time to live that credentials should be given, in seconds.
pub const CREDENTIAL_TTL: u32 = 30;

const PATTERN: &str = "Noise_XX_25519_ChaChaPoly_BLAKE2s";
const PROLOGUE: &[u8] = b"pliant-secure-1";
const TAG: usize = 16;
/// Part of a message in one frame: a Noise message less its tag and the byte that says whether more follows.
const CHUNK: usize = MAX_SEALED - TAG - 1;
/// Handshake frames are a few hundred bytes; a longer one is refused before it is looked at.
const MAX_HANDSHAKE: usize = 8192;
const MAX_NAME: usize = 255;

/// Why there is no session, or none any more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecureError {
    /// A purpose or a name that is empty, too long, or has control characters in it.
    #[error("{what} {text:?} must be 1 to {MAX_NAME} bytes without control characters")]
    Name {
        /// What it names.
        what: &'static str,
        /// As given.
        text: String,
    },
    /// Noise refused: altered, cut, repeated or out of order.
    #[error("the secure channel refused a frame: {0}")]
    Noise(snow::Error),
    /// A frame that is none of this protocol's.
    #[error("{0}")]
    Frame(&'static str),
    /// A credential could not be made or decoded; the text is MUNGE's.
    #[error("credential: {0}")]
    Credential(String),
    /// The peer runs under another uid than expected.
    #[error("the peer's credential was made by uid {found}, expected {expected}")]
    Uid {
        /// Whose it is.
        found: u32,
        /// Whose it should be.
        expected: u32,
    },
    /// The peer's credential says something else than this connection.
    #[error("the peer's credential does not fit this connection: its {field} differs")]
    Mismatch {
        /// Which part.
        field: &'static str,
    },
    /// The peer has another name than expected.
    #[error("the peer calls itself {found:?}, expected {expected:?}")]
    PeerName {
        /// Its own word.
        found: String,
        /// What was asked for.
        expected: String,
    },
    /// A message above [`MAX_FRAME`], or an empty one.
    #[error("a message of {length} bytes; 1 to {MAX_FRAME} are allowed")]
    Length {
        /// Its length.
        length: usize,
    },
    /// Called out of turn, or after an error.
    #[error("the handshake is not at that point, or has failed before")]
    State,
}

impl From<snow::Error> for SecureError {
    fn from(e: snow::Error) -> Self {
        SecureError::Noise(e)
    }
}

/// What a decoded credential proves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Who made it.
    pub uid: u32,
    /// What it carries.
    pub payload: Vec<u8>,
}

/// How credentials are made and checked; MUNGE in practice. Errors are texts for people.
pub trait Credentials {
    /// A credential that carries `payload` and that only `only_for` can decode, valid for at most
    /// [`CREDENTIAL_TTL`] seconds.
    ///
    /// # Errors
    /// MUNGE's words.
    fn encode(&mut self, payload: &[u8], only_for: u32) -> Result<String, String>;

    /// Checks a credential. One that was decoded before must be refused.
    ///
    /// # Errors
    /// MUNGE's words.
    fn decode(&mut self, credential: &str) -> Result<Proof, String>;
}

/// Who talks to whom, and what for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Party {
    /// Must be equal on both sides.
    pub purpose: String,
    /// Own name: an agent's NodeName, pliantd's host name.
    pub me: String,
    /// The name that the peer must have; `None`: learn it.
    pub peer: Option<String>,
    /// The uid that the peer must have.
    pub peer_uid: u32,
}

/// A session in the making. See the module's example.
#[derive(Debug)]
pub struct Handshake {
    party: Party,
    initiator: bool,
    key: Vec<u8>,
    peer: String,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Initiator: nothing sent yet. Responder: nothing received yet.
    Fresh(Box<HandshakeState>),
    /// Noise messages are under way.
    Noise(Box<HandshakeState>),
    /// Noise is through; the peer's credential is awaited.
    Credential(Channel),
    Done(Channel),
    Failed,
}

#[derive(Debug)]
struct Channel {
    sealer: Sealer,
    opener: Opener,
    peer_key: Vec<u8>,
    hash: Vec<u8>,
}

impl Handshake {
    /// The side that connects.
    ///
    /// # Errors
    /// Bad names, or no randomness.
    pub fn initiator(party: Party) -> Result<Handshake, SecureError> {
        Handshake::new(party, true)
    }

    /// The side that listens.
    ///
    /// # Errors
    /// Bad names, or no randomness.
    pub fn responder(party: Party) -> Result<Handshake, SecureError> {
        Handshake::new(party, false)
    }

    fn new(party: Party, initiator: bool) -> Result<Handshake, SecureError> {
        check_name("purpose", &party.purpose)?;
        check_name("name", &party.me)?;
        let params = || PATTERN.parse::<snow::params::NoiseParams>();
        let pair = Builder::new(params()?).generate_keypair()?;
        let builder = Builder::new(params()?).prologue(PROLOGUE)?.local_private_key(&pair.private)?;
        let noise = if initiator { builder.build_initiator()? } else { builder.build_responder()? };
        Ok(Handshake { party, initiator, key: pair.public, peer: String::new(), stage: Stage::Fresh(Box::new(noise)) })
    }

    /// The initiator's first bytes for the wire.
    ///
    /// # Errors
    /// When called a second time, or by the responder.
    pub fn start(&mut self) -> Result<Vec<u8>, SecureError> {
        match std::mem::replace(&mut self.stage, Stage::Failed) {
            Stage::Fresh(mut noise) if self.initiator => {
                let out = write_noise(&mut noise, self.party.me.as_bytes())?;
                self.stage = Stage::Noise(noise);
                Ok(out)
            }
            _ => Err(SecureError::State),
        }
    }

    /// Takes the payload of one frame and gives the bytes to be written, which may be none.
    ///
    /// # Errors
    /// The handshake has failed: close the connection.
    pub fn step(&mut self, frame: &[u8], credentials: &mut dyn Credentials) -> Result<Vec<u8>, SecureError> {
        let stage = std::mem::replace(&mut self.stage, Stage::Failed);
        if frame.len() > MAX_HANDSHAKE {
            return Err(SecureError::Frame("a handshake frame is too long"));
        }
        let (stage, out) = match (stage, self.initiator) {
            (Stage::Fresh(noise), false) => self.answer(noise, frame)?,
            (Stage::Noise(noise), true) => self.finish_initiator(noise, frame, credentials)?,
            (Stage::Noise(noise), false) => self.finish_responder(noise, frame)?,
            (Stage::Credential(channel), _) => self.check_credential(channel, frame, credentials)?,
            _ => return Err(SecureError::State),
        };
        self.stage = stage;
        Ok(out)
    }

    fn answer(&mut self, mut noise: Box<HandshakeState>, frame: &[u8]) -> Result<(Stage, Vec<u8>), SecureError> {
        let name = read_noise(&mut noise, frame)?;
        self.learn_peer(name)?;
        let out = write_noise(&mut noise, self.party.me.as_bytes())?;
        Ok((Stage::Noise(noise), out))
    }

    fn finish_initiator(
        &mut self,
        mut noise: Box<HandshakeState>,
        frame: &[u8],
        credentials: &mut dyn Credentials,
    ) -> Result<(Stage, Vec<u8>), SecureError> {
        let name = read_noise(&mut noise, frame)?;
        self.learn_peer(name)?;
        let mut out = write_noise(&mut noise, &[])?;
        let mut channel = Channel::new(*noise)?;
        out.extend(self.show_credential(&mut channel, credentials)?);
        Ok((Stage::Credential(channel), out))
    }

    fn finish_responder(&self, mut noise: Box<HandshakeState>, frame: &[u8]) -> Result<(Stage, Vec<u8>), SecureError> {
        if !read_noise(&mut noise, frame)?.is_empty() {
            return Err(SecureError::Frame("the third handshake frame has a payload"));
        }
        Ok((Stage::Credential(Channel::new(*noise)?), vec![]))
    }

    fn check_credential(
        &self,
        mut channel: Channel,
        frame: &[u8],
        credentials: &mut dyn Credentials,
    ) -> Result<(Stage, Vec<u8>), SecureError> {
        let credential = channel.opener.open(frame)?.ok_or(SecureError::Frame("a credential must be one frame"))?;
        let credential =
            std::str::from_utf8(&credential).map_err(|_| SecureError::Frame("a credential must be text"))?;
        let proof = credentials.decode(credential).map_err(SecureError::Credential)?;
        if proof.uid != self.party.peer_uid {
            return Err(SecureError::Uid { found: proof.uid, expected: self.party.peer_uid });
        }
        let expected = self.claim(!self.initiator, &self.peer, &self.party.me, &channel.peer_key, &channel.hash);
        compare(&proof.payload, &expected)?;
        let out = if self.initiator { vec![] } else { self.show_credential(&mut channel, credentials)? };
        Ok((Stage::Done(channel), out))
    }

    fn show_credential(
        &self,
        channel: &mut Channel,
        credentials: &mut dyn Credentials,
    ) -> Result<Vec<u8>, SecureError> {
        let claim = self.claim(self.initiator, &self.party.me, &self.peer, &self.key, &channel.hash);
        let credential =
            credentials.encode(claim.join("\n").as_bytes(), self.party.peer_uid).map_err(SecureError::Credential)?;
        if credential.len() + TAG + 1 > MAX_HANDSHAKE {
            return Err(SecureError::Frame("the credential is too long for a handshake frame"));
        }
        channel.sealer.seal(credential.as_bytes())
    }

    /// What a credential carries, in the order of [`FIELDS`], one a line. The role is in it so that a credential
    /// cannot be sent back to the one that made it.
    fn claim(&self, initiator: bool, from: &str, to: &str, key: &[u8], hash: &[u8]) -> [String; 7] {
        let role = if initiator { "initiator" } else { "responder" };
        [
            "pliant-secure-1".to_owned(),
            self.party.purpose.clone(),
            role.to_owned(),
            from.to_owned(),
            to.to_owned(),
            hex(key),
            hex(hash),
        ]
    }

    fn learn_peer(&mut self, name: Vec<u8>) -> Result<(), SecureError> {
        let name = String::from_utf8(name).map_err(|_| SecureError::Frame("the peer's name is not UTF-8"))?;
        check_name("the peer's name", &name)?;
        match &self.party.peer {
            Some(expected) if *expected != name => {
                Err(SecureError::PeerName { found: name, expected: expected.clone() })
            }
            _ => {
                self.peer = name;
                Ok(())
            }
        }
    }

    /// Whether both sides are proven (as far as this side can know).
    pub fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done(_))
    }

    /// The session.
    ///
    /// # Errors
    /// Before [`Handshake::is_done`].
    pub fn into_session(self) -> Result<Session, SecureError> {
        match self.stage {
            Stage::Done(Channel { sealer, opener, .. }) => {
                Ok(Session { sealer, opener, peer: self.peer, peer_uid: self.party.peer_uid })
            }
            _ => Err(SecureError::State),
        }
    }
}

impl Channel {
    fn new(noise: HandshakeState) -> Result<Channel, SecureError> {
        let peer_key = noise.get_remote_static().ok_or(SecureError::State)?.to_vec();
        let hash = noise.get_handshake_hash().to_vec();
        let state = Arc::new(noise.into_stateless_transport_mode()?);
        let sealer = Sealer { state: Arc::clone(&state), nonce: 0 };
        Ok(Channel { sealer, opener: Opener { state, nonce: 0, message: vec![], failed: false }, peer_key, hash })
    }
}

/// A session with a proven peer.
#[derive(Debug)]
pub struct Session {
    sealer: Sealer,
    opener: Opener,
    peer: String,
    peer_uid: u32,
}

impl Session {
    /// The peer's name; its credential bears it.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// The peer's uid, proven.
    pub fn peer_uid(&self) -> u32 {
        self.peer_uid
    }

    /// As [`Sealer::seal`].
    ///
    /// # Errors
    /// As there.
    pub fn seal(&mut self, message: &[u8]) -> Result<Vec<u8>, SecureError> {
        self.sealer.seal(message)
    }

    /// As [`Opener::open`].
    ///
    /// # Errors
    /// As there.
    pub fn open(&mut self, frame: &[u8]) -> Result<Option<Vec<u8>>, SecureError> {
        self.opener.open(frame)
    }

    /// The two directions, for two tasks.
    pub fn split(self) -> (Sealer, Opener) {
        (self.sealer, self.opener)
    }
}

/// The sending direction.
#[derive(Debug)]
pub struct Sealer {
    state: Arc<StatelessTransportState>,
    nonce: u64,
}

impl Sealer {
    /// Encrypts one message of 1 to [`MAX_FRAME`] bytes. The result is for the wire, lengths included, and has to be
    /// written whole and in order.
    ///
    /// # Errors
    /// A message that is too long or empty.
    pub fn seal(&mut self, message: &[u8]) -> Result<Vec<u8>, SecureError> {
        if message.is_empty() || message.len() > MAX_FRAME {
            return Err(SecureError::Length { length: message.len() });
        }
        let mut out = Vec::with_capacity(message.len() + (message.len() / CHUNK + 1) * (TAG + 5));
        let mut chunks = message.chunks(CHUNK).peekable();
        let mut sealed = vec![0; message.len().min(CHUNK) + 1 + TAG];
        while let Some(chunk) = chunks.next() {
            let mut plain = Vec::with_capacity(chunk.len() + 1);
            plain.push(u8::from(chunks.peek().is_some()));
            plain.extend_from_slice(chunk);
            let length = self.state.write_message(self.nonce, &plain, &mut sealed)?;
            // 2^64 frames are never sent; Noise forbids the last number.
            self.nonce = self.nonce.checked_add(1).ok_or(SecureError::State)?;
            out.extend(wire(sealed.get(..length).unwrap_or_default())?);
        }
        Ok(out)
    }
}

/// The receiving direction.
#[derive(Debug)]
pub struct Opener {
    state: Arc<StatelessTransportState>,
    nonce: u64,
    message: Vec<u8>,
    failed: bool,
}

impl Opener {
    /// Takes the payload of one frame; gives a message when it is whole.
    ///
    /// # Errors
    /// Altered, repeated, missing or misplaced frames, and messages above [`MAX_FRAME`]: close the connection.
    pub fn open(&mut self, frame: &[u8]) -> Result<Option<Vec<u8>>, SecureError> {
        if std::mem::replace(&mut self.failed, true) {
            return Err(SecureError::State);
        }
        if frame.len() > MAX_SEALED || frame.len() < TAG {
            return Err(SecureError::Frame("a frame of a length that no Noise message has"));
        }
        let mut plain = vec![0; frame.len()];
        let length = self.state.read_message(self.nonce, frame, &mut plain)?;
        self.nonce = self.nonce.checked_add(1).ok_or(SecureError::State)?;
        let (more, part) = match plain.get(..length).and_then(<[u8]>::split_first) {
            Some((0, part)) if !part.is_empty() => (false, part),
            Some((1, part)) if part.len() == CHUNK => (true, part),
            _ => return Err(SecureError::Frame("a frame that is no part of a message")),
        };
        if self.message.len() + part.len() > MAX_FRAME {
            return Err(SecureError::Length { length: self.message.len() + part.len() });
        }
        self.message.extend_from_slice(part);
        self.failed = false;
        Ok((!more).then(|| std::mem::take(&mut self.message)))
    }
}

/// What the lines of a claim are, for messages.
const FIELDS: [&str; 7] = ["version", "purpose", "role", "sender", "receiver", "public key", "handshake hash"];

fn compare(found: &[u8], expected: &[String; 7]) -> Result<(), SecureError> {
    if same(found, expected.join("\n").as_bytes()) {
        return Ok(());
    }
    // Which line it is matters to people only; all lines have been compared above.
    let mut lines = found.split(|b| *b == b'\n');
    let differs = |(field, line): (&'static str, &String)| (lines.next() != Some(line.as_bytes())).then_some(field);
    let field = FIELDS.into_iter().zip(expected).find_map(differs).unwrap_or("length");
    Err(SecureError::Mismatch { field })
}

/// Equality in a time that depends on the length only.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && std::hint::black_box(a.iter().zip(b).fold(0, |sum, (x, y)| sum | (x ^ y))) == 0
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn check_name(what: &'static str, text: &str) -> Result<(), SecureError> {
    if text.is_empty() || text.len() > MAX_NAME || text.contains(char::is_control) {
        let text = text.chars().take(MAX_NAME).collect();
        return Err(SecureError::Name { what, text });
    }
    Ok(())
}

fn wire(payload: &[u8]) -> Result<Vec<u8>, SecureError> {
    codec::frame(payload).map_err(|_| SecureError::Length { length: payload.len() })
}

fn write_noise(noise: &mut HandshakeState, payload: &[u8]) -> Result<Vec<u8>, SecureError> {
    let mut message = vec![0; MAX_HANDSHAKE];
    let length = noise.write_message(payload, &mut message)?;
    wire(message.get(..length).unwrap_or_default())
}

fn read_noise(noise: &mut HandshakeState, frame: &[u8]) -> Result<Vec<u8>, SecureError> {
    let mut payload = vec![0; MAX_HANDSHAKE];
    let length = noise.read_message(frame, &mut payload)?;
    payload.truncate(length);
    Ok(payload)
}

#[cfg(test)]
#[path = "secure_tests.rs"]
mod tests;
