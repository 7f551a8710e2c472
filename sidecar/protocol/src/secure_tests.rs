//! Tests of [`super`]: both sides in one process, with credentials that a test can hold, swap and alter.

use super::*;
use crate::codec::Decoder;

const ROOT: u32 = 0;
const PLIANT: u32 = 500;

/// Credentials that behave as MUNGE's do: bound to a decoder, refused when decoded twice.
struct Toy {
    uid: u32,
    made: Vec<String>,
    seen: Vec<String>,
    /// Shown instead of an own one.
    instead: Option<String>,
}

fn toy(uid: u32) -> Toy {
    Toy { uid, made: vec![], seen: vec![], instead: None }
}

impl Credentials for Toy {
    fn encode(&mut self, payload: &[u8], only_for: u32) -> Result<String, String> {
        let text = format!("{} {only_for} {}", self.uid, hex(payload));
        self.made.push(text.clone());
        Ok(self.instead.clone().unwrap_or(text))
    }

    fn decode(&mut self, credential: &str) -> Result<Proof, String> {
        let words: Vec<&str> = credential.split(' ').collect();
        let [uid, only_for, payload] = words[..] else {
            return Err("Invalid credential format".into());
        };
        if only_for != self.uid.to_string() {
            return Err("Unauthorized credential for client".into());
        }
        if self.seen.iter().any(|s| s == credential) {
            return Err("Replayed credential".into());
        }
        self.seen.push(credential.to_owned());
        let payload = (0..payload.len() / 2).map(|i| u8::from_str_radix(&payload[2 * i..2 * i + 2], 16).unwrap());
        Ok(Proof { uid: uid.parse().unwrap(), payload: payload.collect() })
    }
}

fn party(me: &str, peer_uid: u32) -> Party {
    Party { purpose: "agent".into(), me: me.into(), peer: None, peer_uid }
}

/// Runs both sides; `tamper` may alter the payload of each frame, numbered from 1 in the order on the wire.
fn meet_with(
    agent: Party,
    daemon: Party,
    munges: (&mut Toy, &mut Toy),
    mut tamper: impl FnMut(usize, &mut Vec<u8>),
) -> Result<(Session, Session), SecureError> {
    let mut agent = Handshake::initiator(agent)?;
    let mut daemon = Handshake::responder(daemon)?;
    let (mut up, mut down) = (Decoder::new(MAX_SEALED), Decoder::new(MAX_SEALED));
    up.feed(&agent.start()?);
    let mut count = 0;
    for _ in 0..4 {
        while let Some(mut frame) = up.next_frame().unwrap() {
            count += 1;
            tamper(count, &mut frame);
            down.feed(&daemon.step(&frame, munges.1)?);
        }
        while let Some(mut frame) = down.next_frame().unwrap() {
            count += 1;
            tamper(count, &mut frame);
            up.feed(&agent.step(&frame, munges.0)?);
        }
    }
    Ok((agent.into_session()?, daemon.into_session()?))
}

fn meet() -> (Session, Session) {
    meet_with(party("n1", PLIANT), party("ctl", ROOT), (&mut toy(ROOT), &mut toy(PLIANT)), |_, _| ()).unwrap()
}

fn frames(wire: &[u8]) -> Vec<Vec<u8>> {
    let mut decoder = Decoder::new(MAX_SEALED);
    decoder.feed(wire);
    std::iter::from_fn(|| decoder.next_frame().unwrap()).collect()
}

fn open_all(session: &mut Session, wire: &[u8]) -> Result<Vec<Vec<u8>>, SecureError> {
    let mut out = vec![];
    for frame in frames(wire) {
        out.extend(session.open(&frame)?);
    }
    Ok(out)
}

#[test]
fn messages_of_all_lengths_go_both_ways() {
    let (mut agent, mut daemon) = meet();
    assert_eq!((agent.peer(), daemon.peer(), daemon.peer_uid()), ("ctl", "n1", ROOT));
    for length in [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, MAX_FRAME] {
        let message = vec![7; length];
        let wire = agent.seal(&message).unwrap();
        assert_eq!(open_all(&mut daemon, &wire).unwrap(), std::slice::from_ref(&message), "{length}");
        let wire = daemon.seal(&message).unwrap();
        assert_eq!(open_all(&mut agent, &wire).unwrap(), [message], "{length}");
    }
    assert!(matches!(agent.seal(&vec![0; MAX_FRAME + 1]), Err(SecureError::Length { .. })));
    assert!(matches!(agent.seal(&[]), Err(SecureError::Length { .. })));
}

#[test]
fn a_wrong_uid_is_refused_on_either_side() {
    let run = |agent, daemon| {
        meet_with(party("n1", PLIANT), party("ctl", ROOT), (&mut toy(agent), &mut toy(daemon)), |_, _| ())
    };
    assert!(matches!(run(1000, PLIANT), Err(SecureError::Uid { found: 1000, expected: ROOT })));
    // Somebody else's pliantd cannot even decode the agent's credential.
    let e = run(ROOT, 1000).unwrap_err().to_string();
    assert_eq!(e, "credential: Unauthorized credential for client");
}

#[test]
fn an_agent_refuses_a_daemon_of_another_uid_that_can_decode() {
    // A daemon that decodes what is not its own (a compromised one), but cannot forge uids.
    struct Both(Toy, Toy);
    impl Credentials for Both {
        fn encode(&mut self, payload: &[u8], only_for: u32) -> Result<String, String> {
            self.0.encode(payload, only_for)
        }
        fn decode(&mut self, credential: &str) -> Result<Proof, String> {
            self.1.decode(credential)
        }
    }
    let (mut agent, mut daemon) =
        (Handshake::initiator(party("n1", PLIANT)).unwrap(), Handshake::responder(party("ctl", ROOT)).unwrap());
    let (mut munge, mut both) = (toy(ROOT), Both(toy(1000), toy(PLIANT)));
    let two = daemon.step(&frames(&agent.start().unwrap())[0], &mut both).unwrap();
    let three = frames(&agent.step(&frames(&two)[0], &mut munge).unwrap());
    assert!(daemon.step(&three[0], &mut both).unwrap().is_empty());
    let five = daemon.step(&three[1], &mut both).unwrap();
    let e = agent.step(&frames(&five)[0], &mut munge).unwrap_err();
    assert!(matches!(e, SecureError::Uid { found: 1000, expected: PLIANT }));
    assert!(!agent.is_done() && matches!(agent.into_session(), Err(SecureError::State)));
}

#[test]
fn another_purpose_or_name_is_refused() {
    let mut other = party("n1", PLIANT);
    other.purpose = "replica".into();
    let e = meet_with(other, party("ctl", ROOT), (&mut toy(ROOT), &mut toy(PLIANT)), |_, _| ()).unwrap_err();
    assert!(matches!(e, SecureError::Mismatch { field: "purpose" }), "{e}");
    let mut named = party("n1", PLIANT);
    named.peer = Some("other".into());
    let e = meet_with(named, party("ctl", ROOT), (&mut toy(ROOT), &mut toy(PLIANT)), |_, _| ()).unwrap_err();
    assert!(matches!(e, SecureError::PeerName { .. }), "{e}");
    for bad in ["", "a\nb", &"x".repeat(256)] {
        assert!(matches!(Handshake::initiator(party(bad, 0)), Err(SecureError::Name { .. })));
    }
}

#[test]
fn a_credential_of_another_connection_is_refused() {
    let mut first = toy(ROOT);
    meet_with(party("n1", PLIANT), party("ctl", ROOT), (&mut first, &mut toy(PLIANT)), |_, _| ()).unwrap();
    let mut second = toy(ROOT);
    second.instead = first.made.pop();
    let e = meet_with(party("n1", PLIANT), party("ctl", ROOT), (&mut second, &mut toy(PLIANT)), |_, _| ());
    assert!(matches!(e.unwrap_err(), SecureError::Mismatch { field: "public key" }));
}

#[test]
fn a_credential_shown_twice_is_refused() {
    let (mut agent, mut daemon) = (toy(ROOT), toy(PLIANT));
    meet_with(party("n1", PLIANT), party("ctl", ROOT), (&mut agent, &mut daemon), |_, _| ()).unwrap();
    agent.instead = agent.made.pop();
    let e = meet_with(party("n1", PLIANT), party("ctl", ROOT), (&mut agent, &mut daemon), |_, _| ()).unwrap_err();
    assert_eq!(e.to_string(), "credential: Replayed credential");
}

#[test]
fn ones_own_credential_sent_back_is_refused() {
    // Both sides under the same uid and name: only the role tells them apart.
    let (mut agent, mut daemon) = (toy(7), toy(7));
    struct Mirror<'a>(&'a mut Toy, String);
    impl Credentials for Mirror<'_> {
        fn encode(&mut self, _: &[u8], _: u32) -> Result<String, String> {
            Ok(self.1.clone())
        }
        fn decode(&mut self, credential: &str) -> Result<Proof, String> {
            self.1 = credential.to_owned();
            self.0.decode(credential)
        }
    }
    let mut a = Handshake::initiator(party("x", 7)).unwrap();
    let mut d = Handshake::responder(party("x", 7)).unwrap();
    let mut mirror = Mirror(&mut daemon, String::new());
    let two = d.step(&frames(&a.start().unwrap())[0], &mut mirror).unwrap();
    let three = frames(&a.step(&frames(&two)[0], &mut agent).unwrap());
    d.step(&three[0], &mut mirror).unwrap();
    let five = d.step(&three[1], &mut mirror).unwrap();
    let e = a.step(&frames(&five)[0], &mut agent).unwrap_err();
    assert!(matches!(e, SecureError::Mismatch { field: "role" }), "{e}");
}

#[test]
fn cut_longer_or_altered_handshake_frames_are_refused() {
    let fail = |n: usize, alter: fn(&mut Vec<u8>)| {
        meet_with(party("n1", PLIANT), party("ctl", ROOT), (&mut toy(ROOT), &mut toy(PLIANT)), |i, frame| {
            if i == n {
                alter(frame);
            }
        })
        .unwrap_err()
    };
    for n in 1..=5 {
        fail(n, |f| f.truncate(f.len() / 2));
        fail(n, |f| f.clear());
        fail(n, |f| f.extend([0; 3]));
        fail(n, |f| f.extend([0; MAX_HANDSHAKE]));
        for at in [0, 1, 2] {
            let e = match at {
                0 => fail(n, |f| f[0] ^= 1),
                1 => fail(n, |f| *f.last_mut().unwrap() ^= 0x80),
                _ => fail(n, |f| {
                    let middle = f.len() / 2;
                    f[middle] ^= 0x10;
                }),
            };
            assert!(!e.to_string().is_empty());
        }
    }
}

#[test]
fn an_altered_repeated_or_misplaced_frame_ends_a_session() {
    let (mut agent, mut daemon) = meet();
    let one = agent.seal(b"one").unwrap();
    let two = agent.seal(b"two").unwrap();
    assert!(open_all(&mut daemon, &two).is_err(), "misplaced");
    assert!(open_all(&mut daemon, &one).is_err(), "nothing is accepted after an error");

    let (mut agent, mut daemon) = meet();
    let one = agent.seal(b"one").unwrap();
    assert_eq!(open_all(&mut daemon, &one).unwrap(), [b"one"]);
    assert!(open_all(&mut daemon, &one).is_err(), "repeated");

    let (mut agent, mut daemon) = meet();
    let mut frame = frames(&agent.seal(b"one").unwrap()).remove(0);
    frame[1] ^= 1;
    assert!(daemon.open(&frame).is_err(), "altered");

    let (mut agent, mut daemon) = meet();
    let long = frames(&agent.seal(&vec![1; 3 * CHUNK]).unwrap());
    assert!(daemon.open(&long[0]).unwrap().is_none());
    assert!(daemon.open(&long[2]).is_err(), "a part is missing");

    let (mut agent, mut daemon) = meet();
    let own = agent.seal(b"one").unwrap();
    assert!(open_all(&mut agent, &own).is_err(), "reflected");
    assert!(daemon.open(&[]).is_err() && daemon.open(&[0; 15]).is_err());
}

#[test]
fn a_peer_cannot_make_us_hold_more_than_one_message() {
    let (agent, mut daemon) = meet();
    let (sealer, _) = agent.split();
    let plain = [vec![1], vec![0; CHUNK]].concat();
    let mut sealed = vec![0; MAX_SEALED];
    for nonce in 1.. {
        let length = sealer.state.write_message(nonce, &plain, &mut sealed).unwrap();
        match daemon.open(&sealed[..length]) {
            Ok(None) => assert!(nonce < 20),
            other => {
                assert!(matches!(other, Err(SecureError::Length { .. })));
                break;
            }
        }
    }
}

#[test]
fn out_of_turn_calls_are_errors() {
    let mut munge = toy(ROOT);
    let mut daemon = Handshake::responder(party("ctl", ROOT)).unwrap();
    assert!(matches!(daemon.start(), Err(SecureError::State)));
    let mut agent = Handshake::initiator(party("n1", PLIANT)).unwrap();
    assert!(matches!(agent.step(b"x", &mut munge), Err(SecureError::State)));
    assert!(matches!(agent.start(), Err(SecureError::State)), "an error is final");
}
