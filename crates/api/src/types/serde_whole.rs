//! Deserialization of whole numbers, which reads 5.0 as 5 (RFC 8259, Sect. 6, and JSON Schema, "integer").

use std::fmt::Display;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

#[derive(Deserialize)]
#[serde(untagged)]
enum JsonNumber {
    Integer(u64),
    Float(f64),
}

fn to_whole_number<T: TryFrom<u64, Error: Display>, E: serde::de::Error>(number: JsonNumber) -> Result<T, E> {
    let integer = match number {
        JsonNumber::Integer(whole) => whole,
        // The conversion is exact up to 2^53 - 1, the largest number in requests.
        JsonNumber::Float(other) if other >= 0.0 && other.fract() == 0.0 && other <= super::MAX_SAFE_INTEGER as f64 => {
            other as u64
        }
        JsonNumber::Float(other) => return Err(E::custom(format!("{other}: expected a whole number from 0 on"))),
    };
    T::try_from(integer).map_err(|error| E::custom(format!("{integer}: {error}")))
}

pub fn deserialize_whole_number<'de, T: TryFrom<u64, Error: Display>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    let number =
        JsonNumber::deserialize(deserializer).map_err(|_| D::Error::custom("expected a whole number from 0 on"))?;
    to_whole_number(number)
}
