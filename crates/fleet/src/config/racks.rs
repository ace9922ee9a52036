//! Checks of the lists `racks` of the fleet and of servers, which contain the racks that agents may use.

use std::collections::BTreeSet;

use coreward_config::{PrintableName, Spanned, TomlReader};

use super::unique_values::UniqueValues;

/// Returns the names in a list of racks, or `None` if there is no list. Reports duplicates, and names that are missing
/// in `known_racks`, the fleet's list of racks.
pub fn parse_rack_names(
    rack_entries: Option<&[Spanned<PrintableName>]>,
    known_racks: Option<&BTreeSet<String>>,
    reader: &mut TomlReader<'_>,
) -> Option<BTreeSet<String>> {
    let listed_names = rack_entries?;
    let mut seen_racks = UniqueValues::new("rack");
    for name in listed_names {
        let PrintableName(rack) = name.get_ref();
        seen_racks.insert(Some(rack), &name.span(), reader);
        if let Some(known_racks) = known_racks.filter(|known| !known.contains(rack)) {
            let message = format_args!("rack {rack:?} does not exist: expected one of the fleet's `racks`");
            reader.report_unknown_name(name.span(), message, rack, known_racks.iter().map(String::as_str));
        }
    }
    Some(listed_names.iter().map(|name| name.get_ref().0.clone()).collect())
}

/// Returns the names in a list of the fleet document, or `None` if there is no list. Reports duplicates. `value_kind`
/// is the kind of the entries in error messages, such as "rack".
pub fn parse_unique_names(
    value_kind: &'static str,
    name_entries: Option<&[Spanned<PrintableName>]>,
    reader: &mut TomlReader<'_>,
) -> Option<BTreeSet<String>> {
    let mut unique_values = UniqueValues::new(value_kind);
    for name in name_entries? {
        unique_values.insert(Some(&name.get_ref().0), &name.span(), reader);
    }
    Some(name_entries?.iter().map(|name| name.get_ref().0.clone()).collect())
}
