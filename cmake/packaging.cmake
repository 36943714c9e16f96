# SPDX-License-Identifier: Apache-2.0
# Debian packages by CPack: libanchorkv0, libanchorkv-dev, anchorkv-cli. tools/check_deb.sh builds, installs and uses them.
#
#   cmake --preset deb && cmake --build --preset deb && cd build/deb && cpack
#
# The command carries libllama inside; built by tools/deps.sh that is made for the processor it was built on. For other
# people's machines give a portable one: -DAKV_LLAMA_DIR=PREFIX, configured with -DGGML_NATIVE=OFF.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME anchorkv)
set(CPACK_PACKAGE_VENDOR "AnchorKV")
# Whoever builds for others says who answers for the packages: -DCPACK_PACKAGE_CONTACT="Name <address>".
set(CPACK_PACKAGE_CONTACT "AnchorKV contributors <anchorkv@localhost>" CACHE STRING "maintainer of the Debian packages")
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "compressed key/value caches of language models")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL runtime dev)
if(TARGET akv)
  list(APPEND CPACK_COMPONENTS_ALL cli)
endif()
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(version ${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE})
set(long "AnchorKV shrinks a transformer's key/value cache 10 to 20 times
without dropping a token, and attends to the compressed form directly.")
file(WRITE ${CMAKE_BINARY_DIR}/triggers "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME libanchorkv${PROJECT_VERSION_MAJOR})
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA ${CMAKE_BINARY_DIR}/triggers)
set(CPACK_DEBIAN_RUNTIME_DESCRIPTION "${long}\nThis package holds the shared library.")

set(CPACK_DEBIAN_DEV_PACKAGE_NAME libanchorkv-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "libanchorkv${PROJECT_VERSION_MAJOR} (= ${version}), libc6-dev")
set(CPACK_DEBIAN_DEV_PACKAGE_SUGGESTS "pkg-config, cmake")
set(CPACK_DEBIAN_DEV_DESCRIPTION "${long}\nThis package holds the headers and the static library.")

set(CPACK_DEBIAN_CLI_PACKAGE_NAME anchorkv-cli)
set(CPACK_DEBIAN_CLI_PACKAGE_SECTION utils)
set(CPACK_DEBIAN_CLI_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_CLI_DESCRIPTION "${long}
The command reads documents with llama.cpp, which is linked into it and
may be built for one kind of processor only.")

# What every Debian package brings: its licence and what changed.
option(AKV_DEBIAN_DOCS "install each component's copyright and changelog where Debian looks for them" OFF)
if(AKV_DEBIAN_DOCS)
  string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC) # SOURCE_DATE_EPOCH, if set, is heeded
  file(WRITE ${CMAKE_BINARY_DIR}/changelog.Debian "anchorkv (${version}) unstable; urgency=medium\n\n"
       "  * What is new is said in changelog.gz.\n\n -- ${CPACK_PACKAGE_CONTACT}  ${date}\n")
  configure_file(NEWS.md ${CMAKE_BINARY_DIR}/changelog COPYONLY)
  execute_process(COMMAND gzip -9nf ${CMAKE_BINARY_DIR}/changelog ${CMAKE_BINARY_DIR}/changelog.Debian
                  COMMAND_ERROR_IS_FATAL ANY)
  foreach(component ${CPACK_COMPONENTS_ALL})
    string(TOUPPER ${component} upper)
    set(folder ${CMAKE_INSTALL_DATADIR}/doc/${CPACK_DEBIAN_${upper}_PACKAGE_NAME})
    install(FILES ${CMAKE_BINARY_DIR}/changelog.gz ${CMAKE_BINARY_DIR}/changelog.Debian.gz DESTINATION ${folder} COMPONENT ${component})
    install(FILES cmake/copyright DESTINATION ${folder} COMPONENT ${component})
  endforeach()
endif()
include(CPack)
