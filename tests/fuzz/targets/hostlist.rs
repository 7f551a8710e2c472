//! Hostlists of both kinds of releases; what is expanded can be written and read back.
#![no_main]

use pliant_model::hostlist::{MAX_NAMES, Release, compress, expand, expand_for};

libfuzzer_sys::fuzz_target!(|text: &str| {
    let _ = expand_for(text, Release::Old);
    if let Ok(names) = expand(text) {
        assert!(names.len() <= MAX_NAMES);
        assert_eq!(expand(&compress(&names)), Ok(names));
    }
});
