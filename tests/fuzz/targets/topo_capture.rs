//! Captures of nvidia-smi and rocm-smi.
#![no_main]

use pliant_model::capture::{self, Capture};

libfuzzer_sys::fuzz_target!(|text: &str| {
    match capture::read(text) {
        Err(e) => assert!(e.line <= text.lines().count() && !e.reason.is_empty(), "{e}"),
        Ok(Capture::Topology(t)) => assert_eq!(t.links.len(), t.gpus.len() * t.gpus.len()),
        Ok(Capture::List(all)) => assert!(all.len() <= capture::MAX_GPUS),
    }
});
