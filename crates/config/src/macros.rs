//! Macros that describe the tables and enumerated values of configuration files.

/// Defines a struct for a table of a file, with a field for each key. The fields' doc comments become descriptions in
/// the JSON schema.
///
/// ```
/// coreward_config::config_struct! {
///     /// A daemon's file.
///     #[derive(Debug)]
///     pub struct Daemon {
///         /// Name of the daemon.
///         pub name: coreward_config::Name,
///         /// Entries of its table.
///         pub entries: u32 as coreward_config::Number<1, 64> = coreward_config::Number(8),
///         /// Interval of polls.
///         pub interval:
///             Option<coreward_config::BoundedDuration<{ coreward_config::SECOND }, { coreward_config::MINUTE }>>,
///         /// Names of services.
///         pub services as "service": Vec<String>,
///         /// Enables debug logs.
///         pub verbose: bool = false,
///     }
///     elsewhere {
///         "key" => "`key_file`",
///     }
/// }
/// let source = coreward_config::Source::from_text("daemon.toml", "name = \"a\"\nkey = 5\n");
/// let mistakes = source.read_as(|daemon: Daemon, _| Some(daemon)).unwrap_err();
/// assert_eq!(
///     mistakes.to_string(),
///     "daemon.toml:2:1: key `key`: is not known here: expected `key_file`"
/// );
/// ```
///
/// `as "service"` names the key if it differs from the field's name. `: u32 as Number<1, 8>` reads the value as
/// `Number<1, 8>` and converts it to `u32`. `= false` is the default, which also replaces a wrong value. Without a
/// default, keys of type `Option` and `Vec` are optional, and other keys are required.
#[macro_export]
macro_rules! config_struct {
    (
        $(#[$meta:meta])*
        $visibility:vis struct $name:ident {
            $(
                $(#[doc = $doc:literal])*
                $field_visibility:vis $field:ident $(as $key:literal)? : $type:ty $(as $in_file:ty)? $(= $default:expr)?
            ),* $(,)?
        }
        $(elsewhere { $($elsewhere:literal => $expected:expr),* $(,)? })?
    ) => {
        $(#[$meta])*
        $visibility struct $name {
            $($(#[doc = $doc])* $field_visibility $field: $type,)*
        }

        impl $crate::FromToml for $name {
            fn read(
                value: &$crate::Spanned<$crate::toml::de::DeValue<'_>>,
                reader: &mut $crate::TomlReader<'_>,
            ) -> Option<Self> {
                let known = &[$($crate::config_struct!(@key $field $($key)?)),*];
                let elsewhere: &[(&str, &str)] = &[$($(($elsewhere, $expected)),*)?];
                let table = reader.read_table::<Self>(value, known, elsewhere)?;
                // All keys are read before the first missing one returns, so that every mistake is found.
                $(let $field: Option<$crate::config_struct!(@in_file $type $(, $in_file)?)> =
                    table.read_key(
                        $crate::config_struct!(@key $field $($key)?),
                        $crate::config_struct!(@default $($default)?),
                        reader,
                    );)*
                Some(Self { $($field: $crate::config_struct!(@convert $field? $(, $in_file)?)),* })
            }

            fn describe_valid_values() -> String {
                "a table".to_owned()
            }

            fn schema() -> $crate::serde_json::Value {
                let mut properties = $crate::serde_json::Map::new();
                let mut required: Vec<&str> = Vec::new();
                $({
                    let key = $crate::config_struct!(@key $field $($key)?);
                    type InFile = $crate::config_struct!(@in_file $type $(, $in_file)?);
                    let mut schema = <InFile as $crate::FromToml>::schema();
                    schema["description"] = concat!($($doc),*).trim().into();
                    properties.insert(key.to_owned(), schema);
                    let has_default = $crate::config_struct!(@has $($default)?);
                    if <InFile as $crate::FromToml>::IS_KEY_REQUIRED && !has_default {
                        required.push(key);
                    }
                })*
                $crate::serde_json::json!({
                    "type": "object",
                    "properties": properties,
                    "required": required,
                    "additionalProperties": false,
                })
            }
        }
    };
    (@key $field:ident) => { stringify!($field) };
    (@key $field:ident $key:literal) => { $key };
    (@in_file $type:ty) => { $type };
    (@in_file $type:ty, $in_file:ty) => { $in_file };
    (@convert $value:expr) => { $value };
    (@convert $value:expr, $in_file:ty) => { <$in_file>::into($value) };
    (@default) => { None };
    (@default $default:expr) => { Some(|| $default) };
    (@has) => { false };
    (@has $default:expr) => { true };
}

/// Implements [`FromToml`](crate::FromToml) for a type whose values are strings from a fixed set. The arguments are the
/// type, its description in diagnostics, and an iterator over the pairs of string and value.
#[macro_export]
macro_rules! string_enum {
    ($type:ty, $what:expr, $all:expr) => {
        impl $crate::FromToml for $type {
            fn read(
                value: &$crate::Spanned<$crate::toml::de::DeValue<'_>>,
                reader: &mut $crate::TomlReader<'_>,
            ) -> Option<Self> {
                $crate::parse_choice($what, IntoIterator::into_iter($all).collect(), value, reader)
            }

            fn describe_valid_values() -> String {
                let all: Vec<(String, Self)> = IntoIterator::into_iter($all).collect();
                let names: Vec<String> = all.into_iter().map(|(name, _)| format!("\"{name}\"")).collect();
                match names.split_last() {
                    Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
                    _ => names.concat(),
                }
            }

            fn schema() -> $crate::serde_json::Value {
                let all: Vec<(String, Self)> = IntoIterator::into_iter($all).collect();
                $crate::choice_schema(all.into_iter().map(|(name, _)| name))
            }
        }
    };
}

/// Defines an enum for a TOML table. The value of one key (the tag) selects the variant, whose fields are further keys.
#[macro_export]
macro_rules! config_enum {
    (
        $(#[$meta:meta])*
        $visibility:vis enum $name:ident by $tag:literal {
            $(
                $(#[doc = $variant_doc:literal])*
                $variant:ident as $variant_name:literal {
                    $(
                        $(#[doc = $doc:literal])*
                        $field:ident : $type:ty $(= $default:expr)?
                    ),* $(,)?
                }
            ),* $(,)?
        }
    ) => {
        $(#[$meta])*
        $visibility enum $name {
            $($(#[doc = $variant_doc])* $variant { $($(#[doc = $doc])* $field: $type),* },)*
        }

        impl $crate::FromToml for $name {
            fn read(
                value: &$crate::Spanned<$crate::toml::de::DeValue<'_>>,
                reader: &mut $crate::TomlReader<'_>,
            ) -> Option<Self> {
                struct Tag(&'static str);
                $crate::string_enum!(Tag, $tag, [$(($variant_name.to_owned(), Tag($variant_name))),*]);
                // The valid keys depend on the tag's value.
                let all = &[$tag $($(, stringify!($field))*)*];
                let named = value.get_ref().as_table().and_then(|table| table.get($tag)?.get_ref().as_str());
                let known: &[&str] = match named {
                    $(Some($variant_name) => &[$tag $(, stringify!($field))*],)*
                    _ => all,
                };
                let table = reader.read_table::<Self>(value, known, &[])?;
                match table.read_key::<Tag>($tag, None, reader)?.0 {
                    $($variant_name => {
                        $(let $field: Option<$type> =
                            table.read_key(stringify!($field), $crate::config_struct!(@default $($default)?), reader);)*
                        Some(Self::$variant { $($field: $field?),* })
                    })*
                    _ => None,
                }
            }

            fn describe_valid_values() -> String {
                "a table".to_owned()
            }

            fn schema() -> $crate::serde_json::Value {
                let mut variants: Vec<$crate::serde_json::Value> = Vec::new();
                $({
                    #[allow(unused_mut)]
                    let mut properties = $crate::serde_json::Map::new();
                    #[allow(unused_mut)]
                    let mut required = vec![$tag];
                    properties.insert($tag.to_owned(), $crate::serde_json::json!({ "enum": [$variant_name] }));
                    $(
                        let mut schema = <$type as $crate::FromToml>::schema();
                        schema["description"] = concat!($($doc),*).trim().into();
                        properties.insert(stringify!($field).to_owned(), schema);
                        let has_default = $crate::config_struct!(@has $($default)?);
                        if <$type as $crate::FromToml>::IS_KEY_REQUIRED && !has_default {
                            required.push(stringify!($field));
                        }
                    )*
                    variants.push($crate::serde_json::json!({
                        "type": "object",
                        "properties": properties,
                        "required": required,
                        "additionalProperties": false,
                    }));
                })*
                $crate::serde_json::json!({ "oneOf": variants })
            }
        }
    };
}

/// Implements `load` and `parse` for the type that describes a configuration file. `$check` checks combinations of
/// values, like the parameter of [`TomlSource::read_as`](crate::TomlSource::read_as).
#[macro_export]
macro_rules! config_file {
    ($config:ident) => {
        $crate::config_file!($config, |config: $config, _| Some(config));
    };
    ($config:ident, $check:expr) => {
        impl $config {
            /// Reads and parses the file. Fails if it cannot be read or has mistakes. The error lists all mistakes.
            pub fn load(path: &std::path::Path) -> Result<Self, $crate::Diagnostics> {
                Self::parse(&$crate::TomlSource::read(path)?)
            }

            /// Parses the text of a file. Fails if it has mistakes. The error lists all mistakes.
            pub fn parse(source: &$crate::TomlSource) -> Result<Self, $crate::Diagnostics> {
                source.read_as($check)
            }
        }
    };
}
