//! Time limits; what is read can be written and read back.
#![no_main]

use pliant_model::time;

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(Some(seconds)) = time::parse(text) {
        assert!(seconds <= time::MAX);
        assert_eq!(time::parse(&time::format(seconds)), Ok(Some(seconds)));
    }
});
