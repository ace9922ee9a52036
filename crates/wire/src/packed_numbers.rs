//! Lists of numbers in `bytes` fields, which are encoded like packed `repeated` fields but read in place. Racks send
//! millions of numbers a second, and protobuf would copy each list into a growing vector.

use prost::bytes::{Bytes, BytesMut};
use prost::encoding::{decode_varint, encode_varint};

use crate::WireError;

/// Encodes integers as a packed `repeated uint64` (or `repeated uint32`) field.
pub fn encode_integers(numbers: impl Iterator<Item = u64>) -> Bytes {
    let mut bytes = BytesMut::with_capacity(numbers.size_hint().0);
    numbers.for_each(|number| encode_varint(number, &mut bytes));
    bytes.freeze()
}

/// Encodes floating-point numbers as a packed `repeated double` field.
pub fn encode_doubles(numbers: impl Iterator<Item = f64>) -> Bytes {
    numbers.flat_map(f64::to_le_bytes).collect::<Vec<u8>>().into()
}

/// Returns the number of integers in an encoded list. In each integer, exactly one byte lacks the continuation bit.
pub fn count_integers(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte < 0x80).count()
}

/// Decodes the integers of an encoded list. The iterator returns `None` for an incomplete or too large integer, and
/// then ends.
pub fn decode_integers(bytes: &[u8]) -> impl Iterator<Item = Option<u64>> + '_ {
    let mut remaining_bytes = bytes;
    std::iter::from_fn(move || match remaining_bytes.split_first()? {
        (small, following_bytes) if *small < 0x80 => {
            remaining_bytes = following_bytes;
            Some(Some(u64::from(*small)))
        }
        _ => {
            let number = decode_varint(&mut remaining_bytes).ok();
            if number.is_none() {
                remaining_bytes = &[];
            }
            Some(number)
        }
    })
}

/// Returns the error for a list with an integer that [`decode_integers`] could not decode.
pub fn invalid_integer_error(field: &str) -> WireError {
    WireError::new(field, "a number that is not whole: expected one of 64 bits in at most 10 bytes")
}

/// Returns the number of doubles in an encoded list. Fails if the last one is incomplete.
pub fn count_doubles(field: &str, bytes: &[u8]) -> Result<usize, WireError> {
    let expected_length_error = || WireError::new(field, format!("{} bytes: expected 8 for each number", bytes.len()));
    bytes
        .len()
        .is_multiple_of(size_of::<f64>())
        .then_some(bytes.len() / size_of::<f64>())
        .ok_or_else(expected_length_error)
}

/// Decodes the doubles of an encoded list.
pub fn decode_doubles(bytes: &[u8]) -> impl Iterator<Item = f64> + '_ {
    bytes.as_chunks().0.iter().map(|number| f64::from_le_bytes(*number))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Message with ordinary `repeated` fields, as other versions generate it from the same protocol.
    #[derive(Clone, PartialEq, prost::Message)]
    struct RepeatedNumbers {
        #[prost(uint64, repeated, tag = "3")]
        numbers: Vec<u64>,
        #[prost(double, repeated, tag = "5")]
        doubles: Vec<f64>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct EncodedNumbers {
        #[prost(bytes = "bytes", tag = "3")]
        numbers: Bytes,
        #[prost(bytes = "bytes", tag = "5")]
        doubles: Bytes,
    }

    proptest! {
        #[test]
        fn packed_bytes_equal_encoded_repeated_fields(
            numbers in prop::collection::vec(prop_oneof![0u64..200, any::<u64>()], 0..50),
            doubles in prop::collection::vec(any::<f64>().prop_filter("compared below", |load| !load.is_nan()), 0..50),
        ) {
            use prost::Message as _;
            let encoded_numbers = encode_integers(numbers.iter().copied());
            let encoded_message = EncodedNumbers { numbers: encoded_numbers,
                doubles: encode_doubles(doubles.iter().copied()) };
            let repeated_message = RepeatedNumbers { numbers, doubles };
            prop_assert_eq!(encoded_message.encode_to_vec(), repeated_message.encode_to_vec());
            prop_assert_eq!(count_integers(&encoded_message.numbers), repeated_message.numbers.len());
            prop_assert_eq!(count_doubles("load", &encoded_message.doubles).unwrap(), repeated_message.doubles.len());
            let decoded_numbers: Vec<u64> = decode_integers(&encoded_message.numbers).map(Option::unwrap).collect();
            prop_assert_eq!(decoded_numbers, repeated_message.numbers);
            prop_assert_eq!(decode_doubles(&encoded_message.doubles).collect::<Vec<f64>>(), repeated_message.doubles);
        }
    }

    #[test]
    fn truncated_list_is_rejected() {
        let numbers: Vec<_> = decode_integers(&[7, 0x80]).collect();
        assert!(numbers == [Some(7), None], "{numbers:?}");
    }
}
