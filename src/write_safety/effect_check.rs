#![doc = include_str!("../../docs/effect-check.md")]
