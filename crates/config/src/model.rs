//! Implementations of [`FromToml`](crate::FromToml) for types of `coreward_model`.

use coreward_model::ServerId;
use coreward_model::connection_table::ConnectionTableSize;
use coreward_model::consistency::{ConsistencyMode, CookieStamper};
use coreward_model::forwarding::ForwardingMode;
use coreward_model::health::{AllServersDownTreatment, HealthCheckJitter, HttpStatusRange, ProbeAddress};
use coreward_model::load::SmoothingWeight;
use coreward_model::placement::BucketCount;
use coreward_model::policy::{ServerCapacity, ServerWeight};
use coreward_model::rss::RssKey;
use coreward_model::tuple::TransportProtocol;
use coreward_model::vlan::Vlan;
use serde_json::{Value, json};
use toml::Spanned;
use toml::de::DeValue;

use crate::from_toml::FromTomlScalar as _;
use crate::{FromToml, SecretText, TomlReader, parse_toml_string, string_enum};

/// Implements `FromToml` for a type whose values are numbers in TOML, which `$parse` converts.
macro_rules! number {
    ($type:ty as $written:ty, $parse:expr, $expected:expr, $schema:tt) => {
        impl FromToml for $type {
            fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
                let written = <$written>::parse_number::<Self>(value, reader)?;
                reader.ok_or_report($parse(written), value.span())
            }

            fn describe_valid_values() -> String {
                $expected.into()
            }

            fn schema() -> Value {
                json!($schema)
            }
        }
    };
}

number!(
    SmoothingWeight as f64,
    SmoothingWeight::new,
    "a number above 0, at most 1",
    { "type": "number", "exclusiveMinimum": 0, "maximum": 1 }
);
number!(BucketCount as u64, BucketCount::new, "a power of two from 1 to 2048",
    { "type": "integer", "enum": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048] });
number!(ServerId as u64, ServerId::try_from, format!("0 to {}", ServerId::COUNT - 1),
    { "type": "integer", "minimum": 0, "maximum": ServerId::COUNT - 1 });
number!(ServerWeight as u64, ServerWeight::new, format!("0 (no new connections) to {}", ServerWeight::MAX),
    { "type": "integer", "minimum": 0, "maximum": ServerWeight::MAX });
number!(ServerCapacity as f64, ServerCapacity::new, "a number above 0, at most 1000000, where 1 is a typical core",
    { "type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000 });
number!(Vlan as u64, Vlan::new, format!("1 to {}", Vlan::MAX_ID),
    { "type": "integer", "minimum": 1, "maximum": Vlan::MAX_ID });
number!(ConnectionTableSize as u64, ConnectionTableSize::try_from, "a power of two from 1024 to 4194304",
    { "type": "integer", "minimum": 1024, "maximum": 4_194_304 });

number!(HealthCheckJitter as f64,
    |fraction| HealthCheckJitter::new(fraction).ok_or_else(|| {
        format!("{fraction}: expected {}", HealthCheckJitter::describe_valid_values())
    }),
    "a part of the interval, from 0 to 1", { "type": "number", "minimum": 0, "maximum": 1 });

string_enum!(
    ProbeAddress,
    "place",
    ProbeAddress::ALL.map(|probe_address| (probe_address.name().to_owned(), probe_address))
);
string_enum!(
    AllServersDownTreatment,
    "when_all_down",
    AllServersDownTreatment::ALL.map(|when| (when.name().to_owned(), when))
);

/// Reads a range of HTTP status codes. Its TOML string has the form "200" or "200-399".
impl FromToml for HttpStatusRange {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, |text| {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            let range = first.parse().ok().zip(last.parse().ok()).and_then(|(first, last)| Self::new(first, last));
            range.ok_or_else(|| format!("{text:?}: expected {}", Self::describe_valid_values()))
        })
    }

    fn describe_valid_values() -> String {
        "status codes from 100 to 599, as \"204\" or \"200-399\"".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": "^[1-5][0-9]{2}(-[1-5][0-9]{2})?$" })
    }
}

string_enum!(
    TransportProtocol,
    "protocol",
    TransportProtocol::ALL.map(|protocol| (protocol.name().to_owned(), protocol))
);
string_enum!(ConsistencyMode, "consistency", ConsistencyMode::ALL.map(|consistency| (consistency.name(), consistency)));
string_enum!(
    ForwardingMode,
    "forwarding",
    ForwardingMode::ALL.map(|forwarding| (forwarding.name().to_owned(), forwarding))
);
string_enum!(
    CookieStamper,
    "who stamps,",
    [CookieStamper::Server, CookieStamper::LoadBalancer, CookieStamper::Off]
        .map(|origin| (origin.name().to_owned(), origin))
);

impl SecretText for RssKey {
    const VALID_TEXT_DESCRIPTION: &'static str =
        "an RSS key: 40 to 52 bytes in hexadecimal, as `ethtool -x` prints them (6d:5a:56: ...)";
}
