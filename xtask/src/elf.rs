//! Properties of ELF files: static or not, needed libraries, contents of a BPF object.

use std::fs;
use std::path::Path;

use anyhow::Context;
use object::build::elf::{Builder, SectionData};
use object::elf::{DT_NEEDED, FileHeader64, PT_INTERP, SHT_STRTAB};
use object::read::elf::{Dyn, ElfFile64, FileHeader, ProgramHeader};
use object::{Endianness, Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionKind, SymbolKind};

use crate::bpf_stack::{Function, Instruction, Place};

/// The section with the functions that programs of a BPF object call; programs have sections of their own.
const CALLED: &str = ".text";

/// The contents of a BPF object.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BpfContents {
    /// Entry points, as `section/function`, sorted.
    pub programs: Vec<String>,
    /// Map names, sorted.
    pub maps: Vec<String>,
    /// Size of the type information the kernel gets, in bytes; 0 when there is none.
    pub btf_bytes: u64,
}

/// Whether the executable runs without a dynamic loader, that is on any node with any C library.
///
/// # Errors
/// The file cannot be read or is not a 64-bit ELF file.
pub fn is_static(path: &Path) -> anyhow::Result<bool> {
    let bytes = read(path)?;
    let header = FileHeader64::<Endianness>::parse(&*bytes).context("not a 64-bit ELF file")?;
    let endian = header.endian().context("unknown byte order")?;
    let segments = header.program_headers(endian, &*bytes).context("read the program headers")?;
    Ok(!segments.iter().any(|segment| segment.p_type(endian) == PT_INTERP))
}

/// Whether an executable has its table of symbols, which nothing on a node reads.
///
/// # Errors
/// The file cannot be read or is not a 64-bit ELF file.
pub fn has_symbols(path: &Path) -> anyhow::Result<bool> {
    let bytes = read(path)?;
    let file = ElfFile64::<Endianness>::parse(&*bytes).context("not a 64-bit ELF file")?;
    Ok(file.symbol_table().is_some())
}

/// The shared libraries an executable names.
///
/// # Errors
/// The file cannot be read or is not a 64-bit ELF file.
pub fn needed_libraries(path: &Path) -> anyhow::Result<Vec<String>> {
    let bytes = read(path)?;
    let file = ElfFile64::<Endianness>::parse(&*bytes).context("not a 64-bit ELF file")?;
    let endian = file.endian();
    let sections = file.elf_header().sections(endian, &*bytes).context("read the sections")?;
    let Some((entries, strings)) = sections.dynamic(endian, &*bytes).context("read the dynamic section")?
    else {
        return Ok(Vec::new());
    };
    let strings = sections.strings(endian, &*bytes, strings).context("read the dynamic strings")?;
    Ok(entries
        .iter()
        .filter(|entry| entry.d_tag(endian) == DT_NEEDED)
        .filter_map(|entry| entry.string(endian, strings).ok())
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .collect())
}

/// Programs, maps and type information of a BPF object.
///
/// # Errors
/// The file cannot be read or is not a 64-bit ELF file.
pub fn bpf_contents(path: &Path) -> anyhow::Result<BpfContents> {
    let bytes = read(path)?;
    let file = ElfFile64::<Endianness>::parse(&*bytes).context("not a 64-bit ELF file")?;
    let mut contents = BpfContents::default();
    for section in file.sections() {
        if section.name() == Ok(".BTF") {
            contents.btf_bytes = section.size();
        }
    }
    for symbol in file.symbols().filter(|symbol| symbol.is_global()) {
        let (Ok(name), Some(index)) = (symbol.name(), symbol.section_index()) else { continue };
        let Ok(section) = file.section_by_index(index) else { continue };
        let section_name = section.name().unwrap_or_default();
        if section.kind() == SectionKind::Text && symbol.kind() == SymbolKind::Text && section_name != CALLED
        {
            contents.programs.push(format!("{section_name}/{name}"));
        } else if section_name == "maps" || section_name == ".maps" {
            contents.maps.push(name.to_owned());
        }
    }
    contents.programs.sort();
    contents.maps.sort();
    Ok(contents)
}

/// The functions of a BPF object, programs and those that they call.
///
/// # Errors
/// The file cannot be read or is not a 64-bit ELF file, or a symbol names what is not in it.
pub fn bpf_functions(path: &Path) -> anyhow::Result<Vec<Function>> {
    let bytes = read(path)?;
    let file = ElfFile64::<Endianness>::parse(&*bytes).context("not a 64-bit ELF file")?;
    let mut functions = Vec::new();
    for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.size() > 0) {
        let Some(index) = symbol.section_index() else { continue };
        let name = symbol.name().context("a function without a name")?.to_owned();
        let section = file.section_by_index(index).context("a function without a section")?;
        let within = symbol.address()..symbol.address() + symbol.size();
        let data = section.data().context("read the code")?;
        let code = data.get(within.start as usize..within.end as usize);
        let (code, _) = code.with_context(|| format!("{name} ends beyond its section"))?.as_chunks::<8>();
        let symbols = section.relocations().filter(|(at, _)| within.contains(at)).filter_map(|(at, it)| {
            let RelocationTarget::Symbol(index) = it.target() else { return None };
            let target = file.symbol_by_index(index).ok()?;
            let place = Place { section: target.section_index()?.0, offset: target.address() };
            Some(((at - within.start) as usize / size_of::<[u8; 8]>(), place))
        });
        functions.push(Function {
            at: Place { section: index.0, offset: within.start },
            is_program: section.name() != Ok(CALLED),
            code: code.iter().copied().map(Instruction::read).collect(),
            symbols: symbols.collect(),
            name,
        });
    }
    Ok(functions)
}

/// The same object without debug information (DWARF), which is four fifths of a BPF object; the kernel needs only its
/// BTF.
///
/// # Errors
/// It is not a 64-bit ELF file.
pub fn without_debug_information(object: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut builder = Builder::read64(object).context("not a 64-bit ELF file")?;
    for section in &mut builder.sections {
        let name: &[u8] = section.name.as_ref();
        section.delete |= name.starts_with(b".debug_") || name.starts_with(b".rel.debug_");
    }
    // LLVM has the names of sections and of symbols in one table, which are two here.
    if !builder.sections.iter().any(|section| matches!(section.data, SectionData::SectionString)) {
        let names = builder.sections.add();
        names.name = ".shstrtab".into();
        names.sh_type = SHT_STRTAB;
        names.sh_addralign = 1;
        names.data = SectionData::SectionString;
    }
    let mut stripped = Vec::new();
    builder.write(&mut stripped).context("write an ELF file")?;
    Ok(stripped)
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use object::write::Object as Written;
    use object::{Architecture, BinaryFormat};

    use super::*;

    #[test]
    fn this_test_executable_is_dynamic_and_needs_libc() {
        let own = std::env::current_exe().unwrap();
        assert!(!is_static(&own).unwrap());
        assert!(has_symbols(&own).unwrap());
        let needed = needed_libraries(&own).unwrap();
        assert!(needed.iter().any(|name| name.starts_with("libc.so")), "{needed:?}");
    }

    #[test]
    fn only_what_a_debugger_reads_is_left_out() {
        let mut object = Written::new(BinaryFormat::Elf, Architecture::Bpf, Endianness::Little);
        for (name, kind) in [
            ("classifier", SectionKind::Text),
            (".debug_info", SectionKind::Debug),
            (".BTF", SectionKind::Other),
        ] {
            let section = object.add_section(Vec::new(), name.into(), kind);
            object.append_section_data(section, name.as_bytes(), 8);
        }
        let stripped = without_debug_information(&object.write().unwrap()).unwrap();
        let file = ElfFile64::<Endianness>::parse(&*stripped).unwrap();
        let content = |name| file.section_by_name(name).map(|section| section.data().unwrap().to_owned());
        assert_eq!(content("classifier"), Some(b"classifier".to_vec()));
        assert_eq!(content(".BTF"), Some(b".BTF".to_vec()));
        assert_eq!(content(".debug_info"), None);
    }

    #[test]
    fn a_text_file_is_refused() {
        let error = is_static(&crate::tree::root().join("Cargo.toml")).unwrap_err();
        assert_eq!(error.to_string(), "not a 64-bit ELF file");
    }
}
