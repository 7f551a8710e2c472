//! Lists of numbers; what is read can be written and read back.
#![no_main]

use pliant_model::conf::index_list;

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(numbers) = index_list::parse(text) {
        assert_eq!(index_list::parse(&index_list::format(&numbers)), Ok(numbers));
    }
});
