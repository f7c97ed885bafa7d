#![no_main]
#![allow(dead_code, missing_docs)]

#[path = "../../tests/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::waits(bytes));
