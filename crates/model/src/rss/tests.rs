use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::*;
use crate::FourTuple;

/// The fingerprint identifies a key in logs, and no byte of the key is printed.
#[test]
fn debug_format_of_an_rss_key_is_its_fingerprint() {
    let key = RssKey::microsoft_verification_key();
    assert_eq!((key.key_fingerprint(), format!("{key:?}")), ("377ecc6a".to_owned(), "RssKey(377ecc6a)".to_owned()));
    assert_ne!(RssKey::random(&mut seeded_rng(1, 0)).key_fingerprint(), key.key_fingerprint());
}

#[test]
fn toeplitz_hash_matches_microsofts_test_vectors() {
    let key = RssKey::microsoft_verification_key();
    let test_vectors = [
        ("66.9.149.187:2794", "161.142.100.80:1766", 0x51cc_c178),
        ("199.92.111.2:14230", "65.69.140.83:4739", 0xc626_b0ea),
        ("24.19.198.95:12898", "12.22.207.184:38024", 0x5c2b_394a),
        ("38.27.205.30:48228", "209.142.163.6:2217", 0xafc7_327f),
        ("153.39.163.191:44251", "202.188.127.2:1303", 0x10e8_28a2),
        ("[3ffe:2501:200:1fff::7]:2794", "[3ffe:2501:200:3::1]:1766", 0x4020_7d3d),
        ("[3ffe:501:8::260:97ff:fe40:efab]:14230", "[ff02::1]:4739", 0xdde5_1bbf),
        ("[3ffe:1900:4545:3:200:f8ff:fe21:67cf]:44251", "[fe80::200:f8ff:fe21:67cf]:38024", 0x02d1_feef),
    ];
    for (client, vip, hash) in test_vectors {
        let tuple = FourTuple::new(client.parse().unwrap(), vip.parse().unwrap()).unwrap();
        assert_eq!(key.toeplitz_hash(&tuple.bytes()), hash, "{client} -> {vip}");
        assert_eq!(key.toeplitz_tables().hash_four_tuple(&tuple.bytes()), hash, "{client} -> {vip}");
    }
}

fn any_input_transform() -> impl Strategy<Value = RssInputTransform> {
    proptest::sample::select(&RssInputTransform::ALL[..])
}

proptest! {
    #[test]
    fn source_tables_and_destination_hash_yield_the_toeplitz_hash(
        seed: u64, client: u128, port: u16, vip: u128, vip_port: u16, input_transform in any_input_transform(),
    ) {
        let key = RssKey::random(&mut seeded_rng(seed, 0)).with_input_transform(input_transform);
        let ipv4_address = |address: u128| Ipv4Addr::from(address as u32);
        let tuples = [
            FourTuple::ipv4((ipv4_address(client), port), (ipv4_address(vip), vip_port)),
            FourTuple::ipv6((Ipv6Addr::from(client), port), (Ipv6Addr::from(vip), vip_port)),
        ];
        for tuple in tuples {
            let tables = key.source_hash_contribution_tables(tuple.vip());
            let (input, address) = (tuple.bytes(), tables.len() - 2);
            let source_bytes = input[..address].iter().chain(&input[2 * address..][..2]);
            let source_hash =
                source_bytes.zip(&tables).fold(0, |hash, (byte, table)| hash ^ table[usize::from(*byte)]);
            prop_assert_eq!(source_hash ^ key.destination_hash_part(tuple.vip()), key.toeplitz_hash(&input));
        }
    }

    /// Compares the hashes with the definition of RXH_XFRM_SYM_* in include/uapi/linux/ethtool.h. The expected
    /// hashes transform whole addresses and ports instead of single bytes.
    #[test]
    fn symmetric_inputs_are_hashed_as_ethtool_defines_them(
        seed: u64, client: u32, port: u16, vip: u32, vip_port: u16,
    ) {
        let key_without_transform = RssKey::random(&mut seeded_rng(seed, 0));
        let tuple = FourTuple::ipv4((client.into(), port), (vip.into(), vip_port));
        let symmetric_hash = |addresses: [u32; 2], ports: [u16; 2]| {
            let bytes: Vec<u8> = addresses.iter().flat_map(|address| address.to_be_bytes())
                .chain(ports.iter().flat_map(|port| port.to_be_bytes())).collect();
            key_without_transform.toeplitz_hash(&bytes)
        };
        let (xor, xor_ports) = (client ^ vip, port ^ vip_port);
        let hashes_with_transform = |input| {
            let key = key_without_transform.with_input_transform(input);
            (key.toeplitz_hash(&tuple.bytes()), key.toeplitz_tables().hash_four_tuple(&tuple.bytes()))
        };
        let expected_hash = symmetric_hash([xor, xor], [xor_ports, xor_ports]);
        prop_assert_eq!(hashes_with_transform(RssInputTransform::SymmetricXor), (expected_hash, expected_hash));
        let expected = symmetric_hash([client | vip, xor], [port | vip_port, xor_ports]);
        prop_assert_eq!(hashes_with_transform(RssInputTransform::SymmetricOrXor), (expected, expected));
        let reverse_tuple = FourTuple::ipv4((vip.into(), vip_port), (client.into(), port));
        let reverse_hash = key_without_transform.with_input_transform(RssInputTransform::SymmetricOrXor)
            .toeplitz_hash(&reverse_tuple.bytes());
        prop_assert_eq!(reverse_hash, expected, "both directions hash alike");
    }

    #[test]
    fn formatted_rss_key_round_trips(seed: u64) {
        let key = RssKey::random(&mut seeded_rng(seed, 0));
        prop_assert_eq!(key.to_string().parse(), Ok(key.clone()));
        prop_assert_eq!(key.to_string().replace(':', "").parse(), Ok(key));
    }

    #[test]
    fn balanced_tables_give_cores_equal_entry_counts_within_one(
        seed: u64,
        core_count in 1u16..70,
        bits in 0u32..10,
    ) {
        let table = IndirectionTable::draw_balanced_entries(seed, 1 << bits, core_count).unwrap();
        let mut entry_count_by_core = vec![0usize; usize::from(core_count)];
        table.queue_by_entry().iter().for_each(|queue| entry_count_by_core[usize::from(*queue)] += 1);
        prop_assert!(entry_count_by_core.iter().max().unwrap() - entry_count_by_core.iter().min().unwrap() <= 1);
    }
}

#[test]
fn emulated_nic_registers_round_trip() {
    let rng = &mut seeded_rng(1, 1);
    let indirection_table = IndirectionTable::draw_balanced_entries(1, 128, 4).unwrap();
    let rss = RssConfig { key: RssKey::random(rng), indirection_table: indirection_table.clone() };
    let registers = rss.to_emulated_registers(3).unwrap();
    assert_eq!((registers.mapping.entry_count, registers.mapping.generation), (128, 3));
    let input = [10, 1, 0, 7, 10, 200, 0, 1, 157, 120, 0, 80];
    let hash_by_tables =
        input.iter().zip(&registers.mapping.byte).fold(0, |h, (byte, table)| h ^ table[*byte as usize]);
    assert_eq!(hash_by_tables, rss.key.toeplitz_hash(&input));
    assert_eq!(RssConfig::from_emulated_registers(&registers), Ok(rss.clone()));
    let config_with_transform =
        RssConfig { key: rss.key.with_input_transform(RssInputTransform::SymmetricOrXor), ..rss };
    assert_eq!(
        RssConfig::from_emulated_registers(&config_with_transform.to_emulated_registers(4).unwrap()),
        Ok(config_with_transform)
    );

    let config_with_long_key = RssConfig { key: RssKey::new(&[1; 52]).unwrap(), indirection_table };
    assert_eq!(config_with_long_key.to_emulated_registers(1).unwrap_err(), EmulatedRssError::UnsupportedKeyLength(52));
    assert!(RssConfig::from_emulated_registers(&intf::emulated_rss::default()).is_err());
}

#[test]
fn invalid_indirection_table_is_rejected() {
    assert_eq!(
        IndirectionTable::new(&[0; 100]).unwrap_err().to_string(),
        "an indirection table of 100 entries: expected a power of two from 1 to 2048"
    );
    assert!(IndirectionTable::new(&[]).is_err());
    assert!(IndirectionTable::new(&[70_000]).is_err());
    assert!("6d:5a:5".parse::<RssKey>().unwrap_err().to_string().contains("expected bytes in hexadecimal"));
    assert!("6d:5g".parse::<RssKey>().is_err());
    assert_eq!("6d:5a".parse::<RssKey>().unwrap_err().to_string(), "an RSS key of 2 bytes: expected 40 to 52");
    assert_eq!(RssKey::new(&[0; 39]).unwrap_err().to_string(), "an RSS key of 39 bytes: expected 40 to 52");
}

#[test]
fn uniform_random_numbers_reach_every_value_equally() {
    let mut rng = seeded_rng(7, 7);
    let mut counts_by_value = [0u32; 6];
    (0..6000).for_each(|_| counts_by_value[uniform_below(&mut rng, 6) as usize] += 1);
    assert!(counts_by_value.iter().all(|count| (850..1150).contains(count)), "{counts_by_value:?}");
}
